"""The CPU as a device: values are NumPy arrays, states are written in place, segments run in one native call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.backend.v1 import (
    HOST_DTYPES,
    Array,
    DeviceInfo,
    Limits,
    MemoryInfo,
    Plan,
    Provider,
    Segment,
    Session,
    StepFn,
    StepSession,
    VirtualMemory,
    available_memory,
    find_processors,
    host_virtual_memory,
    host_zeros,
)

from . import _native
from .compile import compile_segment
from .layouts import CPU_LANES, CPU_PAIRS
from .providers import CpuProvider, make_providers

# Variants with an instruction that multiplies and adds pairs of 16 bits: twice the products of f32.
_PAIRS_ARE_FASTER = ("amx", "avx512", "avx512_vnni", "avx_vnni")
_MOST_THREADS = 1024


class CpuDevice:
    """``threads`` None takes one for each fast core that this process may use; ``isa`` None the best variant, or ENGINE_CPU_ISA.
    ``pin_threads`` keeps all threads but the one that runs steps on a core of their own each; ValueError where that cannot
    be."""

    def __init__(self, threads: int | None = None, isa: str | None = None, pin_threads: bool = False) -> None:
        self.isa: str = isa or _native.isa()
        found = find_processors()
        wanted = found.cores if threads is None else threads
        if not 1 <= wanted <= _MOST_THREADS:  # here, too: what is no C int gives no sentence there
            raise ValueError(f"A pool has between 1 and {_MOST_THREADS} threads, not {wanted}.")
        self.pool = _native.Pool(wanted, found.order if pin_threads else (), found.share)
        self._pinned = pin_threads
        self.packing = _native.PackQueue(self.pool.size)

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Array:
        return host_zeros(shape, dtype)  # a large pool costs only what is used of it, unless populate is called

    def free(self, value: Array) -> None:
        """Garbage collection does it."""

    def populate(self, state: Array, first: int, count: int) -> None:
        _native.populate(state[first : first + count])

    def virtual_memory(self) -> VirtualMemory | None:
        return host_virtual_memory()

    def copy_in(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def copy_out(self, value: Array) -> Array:
        return value

    def fence(self) -> None:
        """Every call has finished when it returns."""

    def memory_info(self) -> MemoryInfo:
        return available_memory()

    def describe(self) -> DeviceInfo:
        threads = f"{self.pool.size}, pinned" if self._pinned else str(self.pool.size)
        details = {"isa": self.isa, "threads": threads, "variants": " ".join(_native.isa_list())}
        return DeviceInfo(
            name=f"cpu ({self.isa}, {self.pool.size} threads)",
            backend="cpu",
            kv_layouts=(CPU_LANES, CPU_PAIRS),
            dtypes=frozenset(HOST_DTYPES),
            kv_dtype="int16" if self.isa in _PAIRS_ARE_FASTER else "f16",
            details=details,
        )

    def session(self, plan: Plan) -> Session:
        _native.trim_heap()  # building a tokenizer frees some 15 MB that the C library would keep
        return StepSession(self, plan)

    def providers(self) -> Mapping[str, Sequence[Provider]]:
        # made anew: kept, they and the device would hold each other, and with it the threads
        return make_providers(self)

    def export_blocks(self, state: Array, blocks: Array) -> Array:
        rows: Array = state[blocks]
        return rows

    def import_blocks(self, state: Array, blocks: Array, rows: Array) -> Array:
        state[blocks] = rows
        return state

    def compile(self, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> StepFn | None:
        if not all(isinstance(bound.provider, CpuProvider) for bound in segment.calls):
            return None  # a forced trip through the device runs references on it
        return compile_segment(self, segment, limits, states)
