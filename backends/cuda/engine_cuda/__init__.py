"""The CUDA backend: torch tensors and Triton kernels on NVIDIA's GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from engine.backend.v1 import API, Device, Manifest, Probe

OLDEST = (8, 0)
"""The least compute capability: GPUs before Ampere have no bf16."""
_MAJOR, _MINOR = 75, 76
"""What the driver calls the parts of a compute capability."""


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
    capabilities = _capabilities()
    if not capabilities:
        return Probe(False, "no NVIDIA driver is on this system (libcuda is not found).")
    if max(capabilities) < OLDEST:
        return Probe(False, too_old(capabilities[0]))
    # Without a number the first GPU is opened.
    score = 100 if capabilities[0] >= OLDEST else -10
    return Probe(True, "an NVIDIA GPU through torch and Triton.", score=score)


def too_old(capability: tuple[int, int], index: int = 0) -> str:
    """What is said of a GPU before Ampere."""
    major, minor = capability
    return (
        f"GPU {index} has compute capability {major}.{minor}, and bf16 needs at least 8.0 (Ampere, of 2020, and later)."
    )


def _capabilities() -> list[tuple[int, int]]:
    """The compute capability of each GPU, as the driver says, which loads no torch. Nothing where there is no driver or GPU."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    # Without a GPU cuInit fails.
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []

    def attribute(which: int, index: int) -> int:
        device, found = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetAttribute(ctypes.byref(found), which, device)
        return found.value

    return [(attribute(_MAJOR, index), attribute(_MINOR, index)) for index in range(count.value)]


def _open(index: int, options: Mapping[str, Any]) -> Device:
    from .device import open_device

    return open_device(index, options)


manifest = Manifest("cuda", API, _probe, _open)
