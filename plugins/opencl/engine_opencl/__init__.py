"""The backend opencl of engine: any device with an OpenCL driver."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from engine.backend.v1 import Device, Manifest, Probe

_NO_PACKAGE = "The package pyopencl is missing; install it with: pip install pyopencl"
_NO_DRIVER = "No OpenCL driver has a device here; install one, such as Debian's pocl-opencl-icd for the processor."


def probe() -> Probe:
    """Whether a driver is there. It is asked for its devices, but none is opened."""
    found = _devices() if find_spec("pyopencl") else []
    if not found:
        return Probe(False, _NO_DRIVER if find_spec("pyopencl") else _NO_PACKAGE)
    # Below the engine's own backends: a processor has a faster one.
    return Probe(True, f"OpenCL devices: {', '.join(device.name.strip() for device in found)}.", score=-5)


def open_device(index: int, options: Mapping[str, Any]) -> Device:
    """OpenCL device number ``index``, GPUs first; a number beyond the last is another instance of the last."""
    from .device import OpenCLDevice

    found = _devices()
    return OpenCLDevice(found[min(index, len(found) - 1)], options.get("opencl_lanes"))


def _devices() -> list[Any]:
    import pyopencl as cl

    try:
        found = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error:  # the loader says so where there is no driver
        return []
    return sorted(found, key=lambda device: not device.type & cl.device_type.GPU)


manifest = Manifest("opencl", "1.1", probe, open_device)
