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
    if find_spec("pyopencl") is None:
        return Probe(False, _NO_PACKAGE)
    found = _devices()
    if not found:
        return Probe(False, _NO_DRIVER)
    names = ", ".join(device.name.strip() for device in found)
    # Below the engine's own backends: a processor has faster ones, and so may a GPU.
    return Probe(True, f"OpenCL devices: {names}.", score=-5)


def open_device(index: int, options: Mapping[str, Any]) -> Device:
    """OpenCL device number ``index``, GPUs first; a number beyond the last is another instance of the last."""
    from .device import OpenCLDevice

    found = _devices()
    if not found:
        raise RuntimeError(_NO_DRIVER)
    return OpenCLDevice(found[min(index, len(found) - 1)], lanes=options.get("opencl_lanes"))


def _devices() -> list[Any]:
    import pyopencl as cl

    try:
        platforms = cl.get_platforms()
    except cl.Error:  # the loader says so where there is no driver
        return []
    found = [device for platform in platforms for device in platform.get_devices()]
    return sorted(found, key=lambda device: not device.type & cl.device_type.GPU)


manifest = Manifest("opencl", "1.1", probe, open_device)
