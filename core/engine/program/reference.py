"""The NumPy references as providers: on host arrays, or with every operand taken out of a device and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend.v1 import Array, BoundCall, Call, Device, Frame, Limits, Packed, StepFn, Value, WeightRef
from ..ops import OPS
from ..ops.dtypes import from_f32, to_f32
from ..ops.kv import PLAIN

NARROW = ("f16", "bf16")


class ReferenceProvider:
    """Runs an op's reference. With ``device`` the operands live there: each is copied out, and each result copied in."""

    features: frozenset[str]
    layouts = frozenset({PLAIN.name})
    batch_invariant = True
    name = "reference"
    packer = "reference"

    def __init__(self, op: str, device: Device | None = None) -> None:
        self.op = op
        self._device = device
        spec = OPS[op]
        names = (*spec.inputs, *spec.weights, *spec.states)
        self.features = frozenset(spec.attrs) | {name.rstrip("*?") for name in names if name.endswith("?")}

    def supports(self, call: Call) -> str | None:
        return None

    def wants(self, call: Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        dense = ref.dense()
        progress(ref.rows().nbytes)
        if self._device is None:
            return Packed(dense, dense.nbytes, lambda: dense)
        device, handle = self._device, self._device.copy_in(dense)
        return Packed(handle, dense.nbytes, lambda: device.copy_out(handle))

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        call, spec = bound.call, OPS[bound.call.op]
        attrs = {**spec.attrs, **call.attrs}
        weights = {name: packed.handle for name, packed in bound.weights.items()}

        def run(frame: Frame) -> None:
            given = {name: _widened(self._out(frame.values[value.id]), value) for name, value in call.inputs.items()}
            given |= {name: self._out(handle) for name, handle in weights.items()}
            states = {name: self._out(frame.states[state]) for name, state in call.states.items()}
            dims = {"dims": frame.dims} if spec.takes_dims else {}
            outputs = spec.reference(**spec.arguments({**given, **states}), **attrs, **dims)
            for value, array in zip(call.outputs, outputs, strict=True):
                frame.values[value.id] = self._in(_narrowed(np.ascontiguousarray(array), value))
            self._put_states(frame, call, states)

        return run

    def _put_states(self, frame: Frame, call: Call, states: Mapping[str, Array]) -> None:
        if self._device is None:
            return
        for name, array in states.items():
            old = frame.states[call.states[name]]
            frame.states[call.states[name]] = self._device.copy_in(array)
            if frame.states[call.states[name]] is not old:
                self._device.free(old)

    def _out(self, value: Any) -> Array:
        return value if self._device is None else self._device.copy_out(value)

    def _in(self, array: Array) -> Any:
        return array if self._device is None else self._device.copy_in(array)


def _widened(array: Array, value: Value) -> Array:
    """The references compute in f32, whatever a device keeps its activations in."""
    return to_f32(array, value.dtype) if value.dtype in NARROW else array


def _narrowed(array: Array, value: Value) -> Array:
    return from_f32(array, value.dtype) if value.dtype in NARROW else array
