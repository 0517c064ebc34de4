"""What machine this is, for results that are compared between machines."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from engine.cli.hardware import processor

if TYPE_CHECKING:
    from engine.backend.v1 import DeviceInfo


def describe_machine(device: DeviceInfo | None = None) -> dict[str, Any]:
    """Processor, cores that may be used, bytes of memory, operating system, and the device in the backend's words."""
    from engine.backend.host import available_memory
    from engine.backend.processors import find_processors

    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": find_processors().cores,
        "memory_bytes": available_memory().total,
        "os": platform.platform(),
        "python": platform.python_version(),
    }
    if device is not None:
        found["device"] = device.name
        found |= dict(device.details)
    return found


def _processor() -> str:
    """Its name, and on x86 the family and model: a virtual machine's name may stand for several generations."""
    found = processor()
    name = found.get("model name") or platform.processor() or platform.machine()
    return f"{name}, family {found['cpu family']} model {found['model']}" if "cpu family" in found else name
