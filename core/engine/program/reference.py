"""The NumPy references as providers: on host arrays, or with every operand taken out of a device and put back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend.v1 import Array, BoundCall, Call, Device, Frame, Limits, Packed, StepFn, WeightRef
from ..ops import OPS
from ..ops.kv import PLAIN


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
        call = bound.call
        spec, parameters = OPS[call.op], inspect.signature(OPS[call.op].reference).parameters
        attrs = {**spec.attrs, **call.attrs}
        weights = {name: packed.handle for name, packed in bound.weights.items()}

        def run(frame: Frame) -> None:
            arguments: dict[str, Any] = dict(attrs)
            for name, value in call.inputs.items():
                _set(arguments, name, self._out(frame.values[value.id]))
            for name, handle in weights.items():
                _set(arguments, name, self._out(handle))
            states = {name: self._out(frame.states[state]) for name, state in call.states.items()}
            for name, array in states.items():
                _set(arguments, name, array)
            if "dims" in parameters:
                arguments["dims"] = frame.dims
            outputs = spec.reference(**arguments)
            for value, array in zip(call.outputs, outputs, strict=True):
                frame.values[value.id] = self._in(np.ascontiguousarray(array))
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


def _set(arguments: dict[str, Any], name: str, array: Array) -> None:
    """``page_table.1`` goes into the list ``page_table``, which has a place for each member in order."""
    family, dot, member = name.partition(".")
    if not dot:
        arguments[name] = array
        return
    members = arguments.setdefault(family, [])
    members.extend([None] * (int(member) + 1 - len(members)))
    members[int(member)] = array
