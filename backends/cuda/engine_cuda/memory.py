"""A GPU's memory: what is free of it, and what is taken while something runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.backend.v1 import MemoryInfo


def memory_of(where: torch.device) -> MemoryInfo:
    """As the driver has it, to which torch's allocator first gives back what it keeps for later: large states then lie in memory
    of their own, and not in gaps of what steps use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(where)
    return MemoryInfo(total, free)


def watch(where: torch.device) -> Callable[[], int]:
    """Gives what tells the bytes that were taken at most since: by torch's allocator with all its gaps, and by the driver, for
    kernels, what these spill, graphs, and other libraries. What others give back meanwhile is not counted."""
    torch.cuda.synchronize(where)
    free, reserved = memory_of(where).free, torch.cuda.memory_reserved(where)
    torch.cuda.reset_peak_memory_stats(where)

    def taken() -> int:
        torch.cuda.synchronize(where)
        less = free - torch.cuda.mem_get_info(where)[0]
        beside = less - (torch.cuda.memory_reserved(where) - reserved)
        return torch.cuda.max_memory_reserved(where) - reserved + max(beside, 0)

    return taken
