"""The ROCm backend: the kernels of the CUDA backend on AMD's GPUs, and some of its own in HIP."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.backend.v1 import API, Device, Manifest, Probe

_TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes"
"""Where AMD's driver lists processors and GPUs: a node of a GPU has a gpu_id that is not 0."""


def _probe() -> Probe:
    if find_spec("torch") is None or find_spec("triton") is None:
        return Probe(
            False, "torch and Triton are not installed; on a machine with an AMD GPU install a torch built for ROCm."
        )
    if _hip_version() is None:
        return Probe(False, "this torch is not built for ROCm; install a torch built for ROCm in its place.")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Probe(False, "TRITON_INTERPRET is set, and the interpreter belongs to the backend cuda.")
    if not _gpu_found():
        return Probe(False, f"no AMD GPU is on this system ({_TOPOLOGY} lists none).")
    return Probe(True, "an AMD GPU through torch and Triton.", score=100)


def _hip_version() -> str | None:
    """What ``torch.version.hip`` says, read without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^hip\b[^=]*=\s*['\"](.+)['\"]", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found[1] if found else None


def _gpu_found() -> bool:
    return any(file.read_text().strip() != "0" for file in Path(_TOPOLOGY).glob("*/gpu_id"))


def _open(index: int, options: Mapping[str, Any]) -> Device:
    from .device import open_device

    return open_device(index, options)


manifest = Manifest("rocm", API, _probe, _open)
