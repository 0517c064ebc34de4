"""Devices for measurements and tests of the engine itself: one that computes nothing, and one whose ops take a given time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.v1 import (
    API,
    HOST_DTYPES,
    Array,
    BoundCall,
    Call,
    DeviceInfo,
    Frame,
    Limits,
    Manifest,
    MemoryInfo,
    Packed,
    Plan,
    Probe,
    Provider,
    Segment,
    Session,
    StepFn,
    StepSession,
    Value,
    WeightRef,
    available_memory,
)

# The catalogue is loaded where a device is used: its backend is found and probed without.


class _HostDevice:
    """Values are host arrays."""

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.zeros(shape, HOST_DTYPES[dtype])

    def free(self, value: Array) -> None:
        """Garbage collection does it."""

    def copy_in(self, array: Array) -> Array:
        return array

    def copy_out(self, value: Array) -> Array:
        return value

    def fence(self) -> None:
        """Every call has finished when it returns."""

    def memory_info(self) -> MemoryInfo:
        return available_memory()

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)  # type: ignore[arg-type]  # what is missing here its subclasses have


class NullDevice(_HostDevice):
    """Takes every op and computes none: weights are not read, and every token is 0, with log-probability 0. What a step
    takes with it is what the scheduler, the step's arrays and the loop take."""

    def describe(self) -> DeviceInfo:
        from ..ops.kv import PLAIN

        return DeviceInfo(name="nothing", backend="null", kv_layouts=(PLAIN,))

    def providers(self) -> Mapping[str, Sequence[Provider]]:
        from ..ops import OPS

        return {op: (_NullProvider(op),) for op in OPS}

    def compile(self, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> StepFn:
        return _zeros(segment.outputs)


def _zeros(values: Sequence[Value]) -> StepFn:
    """Zeros for numbers; what is packed, or symbolic beyond a step's sizes, nobody reads."""
    made = [(v.id, v.shape, HOST_DTYPES[v.dtype]) for v in values if v.dtype in HOST_DTYPES]

    def run(frame: Frame) -> None:
        for key, shape, dtype in made:
            frame.values[key] = np.zeros(frame.dims.of(shape), dtype)

    return run


class _NullProvider:
    name = "null"
    packer = "null"
    batch_invariant = True

    def __init__(self, op: str) -> None:
        from ..program.reference import ReferenceProvider

        known = ReferenceProvider(op)
        self.op, self.features, self.layouts = op, known.features, known.layouts

    def supports(self, call: Call) -> str | None:
        return None

    def wants(self, call: Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        return Packed(None, 0, ref.dense)

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        return _zeros(bound.call.outputs)


@dataclass(frozen=True)
class SlowDevice(_HostDevice):
    """The references, each op of which takes at least ``seconds``, or what ``own`` has for it, as a call on a device would:
    the thread sleeps. ``in_flight``: submitted steps at a time."""

    seconds: float
    own: Mapping[str, float]
    in_flight: int = 1

    def describe(self) -> DeviceInfo:
        from ..ops.kv import PLAIN

        return DeviceInfo(name="emulated", backend="slow", kv_layouts=(PLAIN,), max_in_flight=self.in_flight)

    def providers(self) -> Mapping[str, Sequence[Provider]]:
        from ..ops import OPS
        from ..program.reference import ReferenceProvider

        return {op: (_Slowed(ReferenceProvider(op), self.own.get(op, self.seconds)),) for op in OPS}


class _Slowed:
    """A provider whose functions take their time."""

    def __init__(self, provider: Any, seconds: float) -> None:
        self._provider, self._seconds = provider, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        fn = self._provider.bind(bound, limits)

        def run(frame: Frame) -> None:
            end = time.perf_counter() + self._seconds
            fn(frame)
            time.sleep(max(end - time.perf_counter(), 0.0))

        return run


def slow_backend(seconds: float, in_flight: int = 1, **own: float) -> Manifest:
    """A backend of a ``SlowDevice``, for an entry point of a test: ``slow_backend(0.001, attention=0.01)``."""
    about = Probe(True, "The references, slowed down.", score=-1)
    return Manifest("slow", API, lambda: about, lambda index, options: SlowDevice(seconds, own, in_flight), False)


null = Manifest(
    "null",
    API,
    lambda: Probe(True, "Computes nothing: what the engine itself takes. Used by name only.", score=-1),
    lambda index, options: NullDevice(),
    automatic=False,
)
