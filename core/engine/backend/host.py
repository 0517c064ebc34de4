"""Memory of the host, for devices that live in it."""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np

from .cgroups import memory_limit
from .optional import VirtualMemory
from .v1 import HOST_DTYPES, Array, MemoryInfo


def available_memory() -> MemoryInfo:
    """Total and available bytes of main memory, within the container's limit where there is one."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else total // 2
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    limit, left = memory_limit()
    return MemoryInfo(int(min(total, limit)), int(min(free, left)))


def mapping_of(array: Array) -> tuple[mmap.mmap | None, int]:
    """The mapping that an array lies in, if it does, and where in it the array begins."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        whole, owner = owner, owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None, array.ctypes.data - whole.ctypes.data


def host_zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeros on pages of their own, huge ones where the system has them: what nobody touches takes no memory, which an allocator
    that gives freed memory again does not promise, and all of it goes back with the array. MemoryError where there is no more."""
    return _mapped(shape, dtype, 0, "MADV_HUGEPAGE")


def host_virtual_memory() -> VirtualMemory | None:
    """Arrays of the host whose memory comes and goes, or None where the system does not take memory back at once."""
    return VirtualMemory(mmap.PAGESIZE, _reserve, _map, _unmap) if sys.platform == "linux" else None


_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 has no name for it
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, likewise


def _reserve(shape: tuple[int, ...], dtype: str) -> Array:
    """Accessible throughout, in one mapping, since the kernel allows few of them: what has no memory yet would get it when it is
    touched. Huge pages would bring memory that nobody asked for."""
    return _mapped(shape, dtype, _NORESERVE, "MADV_NOHUGEPAGE")


def _mapped(shape: tuple[int, ...], dtype: str, further_flags: int, advice: str) -> Array:
    tag = HOST_DTYPES[dtype]
    size = max(prod(shape) * tag.itemsize, 1)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | further_flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {size} bytes of addresses are free: {error}") from error
    if hasattr(mmap, advice):
        with suppress(OSError):  # a kernel without huge pages knows nothing of them
            memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, tag, prod(shape)).reshape(shape)


def _map(array: Array, first: int, count: int) -> None:
    with suppress(OSError):  # before Linux 5.14 memory comes when it is first written to
        _advise(array, first, count, _POPULATE_WRITE)


def _unmap(array: Array, first: int, count: int) -> None:
    _advise(array, first, count, mmap.MADV_DONTNEED)


def _advise(array: Array, first: int, count: int, advice: int) -> None:
    memory, start = mapping_of(array)
    assert memory is not None, "the array was not reserved"
    entry = array.strides[0]
    memory.madvise(advice, start + first * entry, count * entry)
