"""How much of what an array has addresses for is in memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np


def resident(array: np.ndarray) -> int:
    """Bytes of the mapping that an array lies in which are in memory."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            found = begin <= array.ctypes.data < end
        elif found and words[0] == "Rss:":
            return int(words[1]) * 1024
    raise AssertionError("no mapping holds the array")


def in_memory(array: np.ndarray) -> int:
    """Bytes of an array's own pages that are in memory, whatever lies beside it."""
    first, last = array.ctypes.data // mmap.PAGESIZE, (array.ctypes.data + array.nbytes - 1) // mmap.PAGESIZE
    file = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        entries = np.frombuffer(os.pread(file, 8 * (last + 1 - first), 8 * first), np.uint64)
    finally:
        os.close(file)
    assert len(entries) == last + 1 - first
    return int(np.count_nonzero(entries >> np.uint64(63))) * mmap.PAGESIZE
