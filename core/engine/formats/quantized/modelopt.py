"""NVIDIA's Model Optimizer: NVFP4, and fp8 with one scale a weight or a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.formats.quantized.parts import Parts
from engine.formats.quantized.short_floats import compose_floats


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    """No setting changes what the stored numbers are."""
    compose_floats(parts)
