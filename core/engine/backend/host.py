"""Memory and cores of the host, for devices that live in it."""

from __future__ import annotations

import os
from pathlib import Path

from .v1 import MemoryInfo


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
    limit = _container_limit()
    if limit is not None:
        total, free = min(total, limit[0]), min(free, limit[1])
    return MemoryInfo(total, free)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _container_limit() -> tuple[int, int] | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text().strip(), (root / "memory.current").read_text().strip()
        return (int(limit), max(int(limit) - int(used), 0)) if limit != "max" else None
    except (OSError, ValueError):
        return None
