"""The device: MLX arrays in unified memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from math import prod
from typing import Any

import mlx.core as mx

from engine.backend.v1 import (
    HOST_DTYPES,
    Array,
    Collectives,
    DeviceInfo,
    Group,
    Limits,
    MemoryInfo,
    Plan,
    Provider,
    Segment,
    Session,
    StepFn,
    StepSession,
)

from .arrays import DTYPES, from_host, to_host
from .compile import compile_segment
from .kernels import Run, run_on_metal
from .layouts import PAGES
from .memory import WorkingSet
from .providers import MlxProvider, make_providers
from .ring import RingCollectives


class MetalDevice:
    """MLX evaluates lazily, each thread in a stream of its own, and only the thread that made a graph can evaluate it. So
    whatever leaves a method or a segment is evaluated.

    Options: ``memory_limit``, bytes; ``kernels``, what runs the launches of Metal kernels where there is no Metal."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.metal = mx.metal.is_available()
        self.memory = WorkingSet(options.get("memory_limit"))
        self.kernels: Run | None = options.get("kernels", run_on_metal if self.metal else None)
        # On the CPU a trace runs a C++ compiler for each new chain of elementwise ops, which takes a second.
        self._traced = os.environ.get("ENGINE_METAL_COMPILE", str(int(self.metal))) == "1"
        self._providers = make_providers(self.kernels, self.memory)

    def alloc(self, shape: tuple[int, ...], dtype: str) -> mx.array:
        self.memory.check(prod(shape) * HOST_DTYPES[dtype].itemsize)
        value = mx.zeros(shape, DTYPES[dtype])
        mx.eval(value)
        return value

    def free(self, value: mx.array) -> None:
        """Reference counts do it."""

    def copy_in(self, array: Array) -> mx.array:
        value = from_host(array)
        mx.eval(value)
        return value

    def copy_out(self, value: mx.array) -> Array:
        return to_host(value)

    def fence(self) -> None:
        mx.synchronize()

    def memory_info(self) -> MemoryInfo:
        return self.memory.info()

    def describe(self) -> DeviceInfo:
        about = mx.device_info()
        name = f"{'metal' if self.metal else 'mlx'} ({about['device_name']})"
        details = {"mlx": version("mlx"), "architecture": str(about["architecture"])}
        largest = about.get("max_buffer_length")
        return DeviceInfo(
            name=name,
            backend="metal",
            largest_allocation=int(largest) if largest else None,
            kv_layouts=(PAGES,),
            writes="replace",
            details=details,
        )

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)

    def providers(self) -> Mapping[str, Sequence[Provider]]:
        return self._providers

    def collectives(self, group: Group) -> Collectives:
        return RingCollectives(group)

    def export_blocks(self, state: mx.array, blocks: Array) -> Array:
        return to_host(state[from_host(blocks)])

    def import_blocks(self, state: mx.array, blocks: Array, rows: Array) -> mx.array:
        state[from_host(blocks)] = from_host(rows)
        mx.eval(state)
        return state

    def compile(self, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> StepFn | None:
        if not all(isinstance(bound.provider, MlxProvider) for bound in segment.calls):
            return None  # a forced trip through the device runs references on it
        return compile_segment(segment, limits, self._traced)
