"""What machine this is, for results that are compared between machines."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.backend.v1 import DeviceInfo


def describe_machine(device: DeviceInfo | None = None) -> dict[str, Any]:
    """Processor, cores that may be used, bytes of memory, operating system, and the device in the backend's words."""
    from engine.backend.host import available_memory

    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": _cores(),
        "memory_bytes": available_memory().total,
        "os": platform.platform(),
        "python": platform.python_version(),
    }
    if device is not None:
        found["device"] = device.name
        found |= dict(device.details)
    return found


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
