"""The Metal backend: MLX arrays in unified memory, on Apple's GPUs; without Metal it runs on MLX's CPU build."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from engine.backend.v1 import API, Device, Manifest, Probe


def _probe() -> Probe:
    if find_spec("mlx") is None:
        return Probe(False, "MLX is not installed; on a Mac with Apple silicon run: pip install 'engine[metal]'")
    if (sys.platform, platform.machine()) != ("darwin", "arm64"):
        return Probe(True, "MLX's CPU build, for tests; there is no Metal on this system.", score=-10)
    return Probe(True, "MLX on Apple's GPU.", score=50)


def _open(index: int, options: Mapping[str, Any]) -> Device:
    from .device import MetalDevice

    # A machine has one, whatever number its rank has among others.
    return MetalDevice(options)


manifest = Manifest("metal", API, _probe, _open, single=True)
