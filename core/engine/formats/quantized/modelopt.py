"""NVIDIA's Model Optimizer: NVFP4, and fp8 with one scale a weight or a row. Which layer has which the stored tensors show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.formats.quantized.fp8 import ROUNDED, compose_fp8
from engine.formats.quantized.nvfp4 import compose_modelopt
from engine.formats.quantized.parts import Parts


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    """No setting changes what the stored numbers are."""
    parts.drop_cache_scales()
    for stem in parts.stems(".weight_scale"):
        if f"{stem}.weight_scale_2" in parts.tensors:
            compose_modelopt(parts, stem)
        else:
            compose_fp8(parts, stem, ".weight_scale", None, ROUNDED)
