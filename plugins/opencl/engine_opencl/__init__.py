"""The backend opencl of engine: any device with an OpenCL driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.backend.v1 import Device, Manifest, Probe

_NO_PACKAGE = "The package pyopencl is missing; install it with: pip install pyopencl"
_NO_DRIVER = "No OpenCL driver has a device here; install one, such as Debian's pocl-opencl-icd for the processor."


def probe() -> Probe:
    """Whether a driver is installed. None is loaded, since that takes 60 MB of every process that looks."""
    missing = _NO_PACKAGE if not find_spec("pyopencl") else "" if _drivers() else _NO_DRIVER
    # Below the engine's own backends: a processor has a faster one.
    return Probe(not missing, missing or f"OpenCL drivers: {', '.join(_drivers())}.", score=-5)


def _drivers() -> list[str]:
    """Those that Linux lists for OpenCL's loader; elsewhere the loader itself."""
    if sys.platform != "linux":
        return [name for name in [find_library("OpenCL")] if name]
    listed = Path(os.environ.get("OCL_ICD_VENDORS", "/etc/OpenCL/vendors"))
    return sorted(file.stem for file in listed.glob("*.icd")) if listed.is_dir() else [listed.name]


def open_device(index: int, options: Mapping[str, Any]) -> Device:
    """OpenCL device number ``index``, GPUs first. RuntimeError without a driver that has one, ValueError beyond the last."""
    import pyopencl as cl

    from .device import OpenCLDevice

    try:
        found = [device for platform in cl.get_platforms() for device in platform.get_devices()]
        found.sort(key=lambda device: not device.type & cl.device_type.GPU)
    except cl.Error as error:  # the loader says so where no driver works
        raise RuntimeError(_NO_DRIVER) from error
    if not found:
        raise RuntimeError(_NO_DRIVER)
    if index >= len(found):
        raise ValueError(f"there are {len(found)} OpenCL devices, numbered from 0, and no number {index}.")
    return OpenCLDevice(found[index], options.get("opencl_lanes"))


manifest = Manifest("opencl", "1.1", probe, open_device)
