"""The CUDA backend: torch tensors and Triton kernels on NVIDIA's GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from engine.backend.v1 import API, Device, Manifest, Probe


def _probe() -> Probe:
    if find_spec("torch") is None or find_spec("triton") is None:
        return Probe(
            False, "torch and Triton are not installed; on a machine with an NVIDIA GPU run: pip install 'engine[cuda]'"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Probe(True, "Triton's interpreter on the CPU, for tests: TRITON_INTERPRET is set.", score=-10)
    if version("torch").endswith("+cpu"):
        return Probe(
            False, "this torch is a CPU build; install one for CUDA: pip install --upgrade --force-reinstall torch"
        )
    if not _driver_found():
        return Probe(False, "no NVIDIA driver is on this system (libcuda is not found).")
    return Probe(True, "an NVIDIA GPU through torch and Triton.", score=100)


def _driver_found() -> bool:
    import ctypes

    try:
        count, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    # Without a GPU cuInit fails, and a driver that counts none is no use either.
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _open(index: int, options: Mapping[str, Any]) -> Device:
    from .device import open_device

    return open_device(index, options)


manifest = Manifest("cuda", API, _probe, _open)
