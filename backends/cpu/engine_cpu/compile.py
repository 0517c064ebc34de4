"""A segment as one native call: values declared, calls lowered to kernels, the arena planned once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backend.v1 import HOST_DTYPES, BoundCall, Dims, Frame, Limits, Segment, StepFn, Value

from . import _native
from .drawing import Drawing, find_drawing
from .gating import find_gated
from .weights import SPANS

if TYPE_CHECKING:
    from .device import CpuDevice

ABSENT = -1
UNBOUNDED = 1 << 30
NATIVE_DTYPES = {"f32": "f32", "i32": "i32", "u32": "u32", "bf16": "u16"} | dict.fromkeys(SPANS, "u8")
DIM_NAMES = tuple(f.name for f in fields(Dims))


def packed_row_bytes(depth: int) -> int:
    """Bytes of a packed row: int8 values, an f32 scale a 32-group, an i32 sum a 16-group."""
    return depth + depth // 8 + depth // 4


@dataclass
class Lowering:
    """One call on its way into a native segment."""

    native: Any
    bound: BoundCall
    limits: Limits
    states: Mapping[str, Any]
    ids: Mapping[int, int]
    threads: int
    read: frozenset[int] = frozenset()
    """Ids of the values that a call or anything outside the segment reads."""
    drawing: Drawing | None = None
    gated: Mapping[int, BoundCall] = field(default_factory=dict)
    """By the id of an activation's packed rows, the products that its kernel multiplies."""

    def of(self, bound: BoundCall) -> Lowering:
        """The same for another call in the segment."""
        return replace(self, bound=bound)

    def inputs(self, *names: str) -> list[int]:
        """Native ids of inputs; ABSENT where the call has none of that name."""
        return self.inputs_of(self.bound.call, *names)

    def inputs_of(self, call: Any, *names: str) -> list[int]:
        """The same of another call in the segment."""
        given = call.inputs
        return [self.ids[given[name].id] if name in given else ABSENT for name in names]

    def family(self, name: str) -> list[int]:
        """Native ids of ``name.0``, ``name.1``, ..."""
        members = sorted(self.members(self.bound.call.inputs, name))
        return [self.ids[self.bound.call.inputs[f"{name}.{n}"].id] for n in members]

    @staticmethod
    def members(names: Mapping[str, Any], family: str) -> list[int]:
        return [int(name.partition(".")[2]) for name in names if name.startswith(family + ".")]

    def emit(
        self,
        kernel: str,
        inputs: Sequence[int],
        weights: Sequence[Any] = (),
        states: Sequence[str] = (),
        more_outputs: Sequence[int] = (),
        **numbers: float,
    ) -> None:
        """Append a kernel whose outputs are the call's, and then ``more_outputs``; a plain output that nobody reads beside its
        packed form is absent."""
        outputs = [self.ids[value.id] for value in self.bound.call.outputs]
        if self.bound.call.attrs.get("packed") and self.bound.call.outputs[-2].id not in self.read:
            outputs[-2] = ABSENT
        arrays = [self.states[self.bound.call.states[name]] for name in states]
        outputs += more_outputs
        self.native.add(kernel, list(inputs), outputs, list(weights), arrays, {k: float(v) for k, v in numbers.items()})


def compile_segment(device: CpuDevice, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> StepFn:
    """An fn that runs the segment with the interpreter's lock released."""
    maxima = _maxima(limits)
    native = _native.Segment(device.pool, maxima, limits.max_context, device.isa)
    ids = _declare(native, segment)
    used = (*segment.outputs, *(value for bound in segment.calls for value in bound.call.inputs.values()))
    read = frozenset(value.id for value in used)
    drawing = find_drawing(native, segment, ids, device.pool.size)
    gated = find_gated(segment)
    elsewhere = {bound.call.outputs[0].id for bound in gated.values()}
    for bound in segment.calls:
        if bound.call.outputs and bound.call.outputs[0].id in elsewhere:
            continue
        provider: Any = bound.provider
        provider.lower(Lowering(native, bound, limits, states, ids, device.pool.size, read, drawing, gated))
    native.finish([ids[v.id] for v in segment.inputs], [ids[v.id] for v in segment.outputs])
    return _Step(native, segment)


def _maxima(limits: Limits) -> list[int]:
    # Copies, fills, biases and masks have no maximum: they only enter a segment, and nothing inside it is as long.
    return [getattr(limits.dims, name) or UNBOUNDED for name in DIM_NAMES]


def _declare(native: Any, segment: Segment) -> dict[int, int]:
    values: dict[int, Value] = {}
    for bound in segment.calls:
        for value in (*bound.call.inputs.values(), *bound.call.outputs):
            values.setdefault(value.id, value)
    for value in (*segment.inputs, *segment.outputs):
        values.setdefault(value.id, value)
    ids = {key: n for n, key in enumerate(values)}
    for key, value in values.items():
        native.value(ids[key], _row_bytes(value), _rows(value), NATIVE_DTYPES[value.dtype])
    return ids


def _rows(value: Value) -> str:
    """The leading dimension; ``T*4`` rows are T rows of four."""
    first = str(value.shape[0])
    return (
        first.partition("*")[0]
        if "*" in first
        else first + "".join(f"*{s}" for s in value.shape[1:] if isinstance(s, str))
    )


def _row_bytes(value: Value) -> int:
    size = int(np.prod([s for s in value.shape[1:] if isinstance(s, int)], dtype=np.int64))
    times = int(str(value.shape[0]).partition("*")[2] or 1)
    return times * (packed_row_bytes(size) if value.dtype in SPANS else size * HOST_DTYPES[value.dtype].itemsize)


class _Step:
    """The fn of a compiled segment; outputs are fresh arrays of the step's true size."""

    def __init__(self, native: Any, segment: Segment) -> None:
        self.native = native
        self._inputs = [value.id for value in segment.inputs]
        self._outputs = [(value.id, value.shape, _host_dtype(value), value) for value in segment.outputs]

    def __call__(self, frame: Frame) -> None:
        dims = frame.dims
        values = frame.values
        outputs = []
        for key, shape, dtype, value in self._outputs:
            packed = value.dtype in SPANS
            size = (dims.of(shape[:1])[0], packed_row_bytes(int(shape[1]))) if packed else dims.of(shape)
            made = np.empty(size, dtype)
            values[key] = made
            outputs.append(made)
        self.native.run([getattr(dims, name) for name in DIM_NAMES], [values[key] for key in self._inputs], outputs)


def _host_dtype(value: Value) -> Any:
    return HOST_DTYPES["u8" if value.dtype in SPANS else value.dtype]
