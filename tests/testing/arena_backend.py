"""A backend over one array of bytes, whose providers are the references: what the conformance kit is tried on.

Values lie side by side in the arena, first fit, so that a write beyond one lands in its neighbour. ``spoil`` replaces the
reference of some ops, or wraps the function that is bound.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.backend.v1 import HOST_DTYPES, OPS, DeviceInfo, KVLayout, MemoryInfo, Packed, StepSession
from engine.ops.kv import PLAIN
from engine.ops.spec import OpSpec

SIZE = 1 << 26


@dataclass(frozen=True, eq=False)
class Place:
    """A value: where it lies, until nothing refers to it."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Arena:
    def __init__(self) -> None:
        self.bytes = np.full(SIZE, 0xEE, np.uint8)
        self._used: dict[int, int] = {}

    def take(self, shape: tuple[int, ...], dtype: Any) -> Place:
        place = Place(0, tuple(shape), np.dtype(dtype))
        start = 0
        for first, size in sorted(self._used.items()):
            if first - start >= max(place.nbytes, 1):
                break
            start = max(start, -(-(first + size) // 64) * 64)
        place = Place(start, place.shape, place.dtype)
        self._used[start] = max(place.nbytes, 1)
        weakref.finalize(place, self._used.pop, start)
        return place

    def view(self, place: Place) -> np.ndarray:
        return self.bytes[place.start : place.start + place.nbytes].view(place.dtype).reshape(place.shape)


@dataclass
class ArenaProvider:
    """An op's reference over values in the arena."""

    op: str
    device: ArenaDevice
    spec: OpSpec
    name: str = "arena"
    packer: str = "arena"
    layouts: frozenset[str] = frozenset({PLAIN.name})
    batch_invariant: bool = True
    features: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        names = (*self.spec.inputs, *self.spec.weights, *self.spec.states)
        self.features = frozenset(self.spec.attrs) | {n.rstrip("*?") for n in names if n.endswith("?")}

    def supports(self, call):
        return None

    def wants(self, call):
        return {}

    def pack(self, ref, uses, progress):
        dense = self.device.spoilt_weight(ref)
        return Packed(dense, dense.nbytes, lambda: dense)

    def bind(self, bound, limits):
        call, spec, arena = bound.call, self.spec, self.device.arena
        attrs = {**spec.attrs, **call.attrs}
        weights = {name: packed.handle for name, packed in bound.weights.items()}

        def run(frame):
            given = {name: arena.view(frame.values[value.id]) for name, value in call.inputs.items()}
            states = {name: arena.view(frame.states[state]) for name, state in call.states.items()}
            dims = {"dims": frame.dims} if spec.takes_dims else {}
            outputs = spec.reference(**spec.arguments({**given, **weights, **states}), **attrs, **dims)
            for value, array in zip(call.outputs, outputs, strict=True):
                place = arena.take(array.shape, array.dtype)
                self.device.store(self.op, place, np.ascontiguousarray(array))
                frame.values[value.id] = place

        return run


class ArenaDevice:
    """``spoil``: op -> its spec with another reference. ``spoilt_weight``: how a weight is packed. Nothing of it refers to
    itself, so that its memory goes with it and does not wait for a collector."""

    def __init__(self, spoil: Mapping[str, OpSpec] | None = None) -> None:
        self.arena = Arena()
        self._specs = {**OPS, **(spoil or {})}
        self.spoilt_weight: Callable[[Any], np.ndarray] = lambda ref: np.array(ref.dense())

    def store(self, op: str, place: Place, array: np.ndarray) -> None:
        self.arena.view(place)[...] = array

    def providers(self):
        return {op: (ArenaProvider(op, self, spec),) for op, spec in self._specs.items()}

    def alloc(self, shape, dtype):
        place = self.arena.take(shape, HOST_DTYPES[dtype])
        self.arena.view(place)[...] = 0
        return place

    def free(self, value):
        """The last reference to it does that."""

    def copy_in(self, array):
        place = self.arena.take(array.shape, array.dtype)
        self.arena.view(place)[...] = array
        return place

    def copy_out(self, value):
        return self.arena.view(value).copy()

    def fence(self):
        pass

    def memory_info(self):
        return MemoryInfo(SIZE, SIZE // 2)

    def describe(self):
        return DeviceInfo(name="arena", backend="arena", kv_layouts=(KVLayout(PLAIN.name, PLAIN.dtypes, PLAIN.shapes),))

    def session(self, plan):
        return StepSession(self, plan)
