"""A device whose providers are the references behind a wrapper, so that placement can be tried with any set of ops.

Values on it are ``OnDevice`` objects: an array that crossed without a transfer fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.backend.v1 import HOST_DTYPES, BoundCall, Call, DeviceInfo, KVLayout, MemoryInfo, Packed, StepSession
from engine.ops import OPS
from engine.ops.dense import dequantize_q8, quantize_q8
from engine.ops.kv import PLAIN

EVERY_OP = tuple(OPS)
# The plain layout under another name: the same shapes, but a provider must know it.
FAKE_LAYOUT = KVLayout("fake", PLAIN.dtypes, PLAIN.shapes)
KV_OPS = ("kv_write", "kv_copy", "attention")
FUSED_KV_OP = "rope_kv_write"


@dataclass
class OnDevice:
    array: np.ndarray


@dataclass
class FakeProvider:
    op: str
    name: str = ""
    packer: str = "fake"
    features: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    batch_invariant: bool = True
    refuses: Callable[[Call], str | None] = lambda call: None
    packed_activation: str | None = None
    packs: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def supports(self, call: Call) -> str | None:
        return self.refuses(call)

    def wants(self, call: Call) -> dict[str, str]:
        return {"x": self.packed_activation} if self.packed_activation else {}

    def pack(self, ref: Any, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        self.packs.append((ref.name, tuple(uses)))
        progress(ref.rows().nbytes)
        dense = ref.dense()
        return Packed(OnDevice(dense), dense.nbytes, lambda: dense)

    def bind(self, bound: BoundCall, limits: Any) -> Callable[[Any], None]:
        call, spec = bound.call, OPS[self.op]

        def run(frame: Any) -> None:
            given = {name: self._array(frame.values[v.id]) for name, v in call.inputs.items()}
            if self.op == "quantize":
                packed = quantize_q8(given["x"], "q8g32")
                frame.values[call.outputs[0].id] = OnDevice(packed)
                return
            if self.packed_activation:
                given["x"] = dequantize_q8(given["x"])
            given |= {name: self._array(packed.handle) for name, packed in bound.weights.items()}
            given |= {name: self._array(frame.states[state]) for name, state in call.states.items()}
            extra = {"dims": frame.dims} if spec.takes_dims else {}
            outputs = spec.reference(**spec.arguments(given), **call.attrs, **extra)
            for value, array in zip(call.outputs, outputs, strict=True):
                frame.values[value.id] = OnDevice(np.ascontiguousarray(array))

        return run

    def _array(self, value: Any) -> np.ndarray:
        assert isinstance(value, OnDevice), f"{self.op} was given a value that is not on the device"
        return value.array


def all_features(op: str) -> frozenset[str]:
    spec = OPS[op]
    names = (*spec.inputs, *spec.weights, *spec.states)
    return frozenset(spec.attrs) | {name.rstrip("*?") for name in names if name.endswith("?")}


def provider(op: str, **settings: Any) -> FakeProvider:
    layouts = frozenset({"fake"}) if op in (*KV_OPS, FUSED_KV_OP) else frozenset()
    defaults = {"name": f"fake.{op}", "features": all_features(op), "layouts": layouts}
    return FakeProvider(op, **(defaults | settings))


class FakeDevice:
    """``offered``: op -> providers in order."""

    def __init__(self, offered: dict[str, list[FakeProvider]], layouts: Sequence[KVLayout] = (FAKE_LAYOUT,)) -> None:
        self.offered = offered
        self.layouts = tuple(layouts)
        self.transfers = [0, 0]

    @classmethod
    def of(cls, *ops: str) -> FakeDevice:
        return cls({op: [provider(op)] for op in ops})

    def providers(self) -> dict[str, list[FakeProvider]]:
        return self.offered

    def alloc(self, shape: tuple[int, ...], dtype: str) -> OnDevice:
        return OnDevice(np.zeros(shape, HOST_DTYPES[dtype]))

    def free(self, value: OnDevice) -> None:
        assert isinstance(value, OnDevice)
        value.array = None

    def copy_in(self, array: np.ndarray) -> OnDevice:
        assert isinstance(array, np.ndarray)
        self.transfers[0] += 1
        return OnDevice(array.copy())

    def copy_out(self, value: OnDevice) -> np.ndarray:
        self.transfers[1] += 1
        return value.array.copy()

    def fence(self) -> None:
        pass

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(1 << 28, 1 << 28)

    def describe(self) -> DeviceInfo:
        return DeviceInfo("fake", "fake", kv_layouts=self.layouts)

    def session(self, plan: Any) -> StepSession:
        return StepSession(self, plan)
