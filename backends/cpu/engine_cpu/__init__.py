"""The CPU backend: NumPy arrays as values, C++ kernels, one native call a step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from engine.backend.v1 import API, Device, Manifest, Probe

_MISSING = (
    "the native kernels are not built; install a wheel of engine, or install a C++17 compiler (such as g++) and "
    "run: pip install --no-binary engine engine"
)


def _probe() -> Probe:
    if find_spec(f"{__name__}._native") is None:
        return Probe(False, _MISSING)
    return Probe(True, "C++ kernels on the processor.", score=10)


def _open(index: int, options: Mapping[str, Any]) -> Device:
    from .device import CpuDevice

    pin = bool(options.get("pin_threads"))
    return CpuDevice(threads=options.get("threads"), isa=options.get("isa"), pin_threads=pin)


manifest = Manifest("cpu", API, _probe, _open, single=True)
