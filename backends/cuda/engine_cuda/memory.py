"""A GPU's memory: what is free of it, and what is taken while something runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from engine.backend.v1 import MemoryInfo

WHOLE = threading.RLock()
"""Held by who waits for all of a GPU, or gives its memory back, which nobody may while a graph is captured: both would fail."""


def wait_for(where: torch.device) -> None:
    """Until the GPU has done all that was submitted to it."""
    with WHOLE:
        torch.cuda.synchronize(where)


def memory_of(where: torch.device) -> MemoryInfo:
    """As the driver has it, to which torch's allocator first gives back what it keeps for later: large states then lie in memory
    of their own, and not in gaps of what steps use."""
    with WHOLE:
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(where)
    return MemoryInfo(total, free)


def watch(where: torch.device) -> Callable[[], int]:
    """Gives what tells the bytes that were taken at most since: by torch's allocator with all its gaps, and by the driver, for
    kernels, what these spill, graphs, and other libraries. What others give back meanwhile is not counted."""
    wait_for(where)
    free, reserved = memory_of(where).free, torch.cuda.memory_reserved(where)
    torch.cuda.reset_peak_memory_stats(where)

    def taken() -> int:
        wait_for(where)
        less = free - torch.cuda.mem_get_info(where)[0]
        beside = less - (torch.cuda.memory_reserved(where) - reserved)
        return torch.cuda.max_memory_reserved(where) - reserved + max(beside, 0)

    return taken
