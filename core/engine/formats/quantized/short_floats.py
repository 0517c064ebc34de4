"""Floats of 4 and 8 bits beside each other: which a layer has is told by what is stored."""

from __future__ import annotations

from engine.formats.quantized import mxfp4, nvfp4
from engine.formats.quantized.fp8 import ROUNDED, compose_fp8
from engine.formats.quantized.parts import Parts


def compose_floats(parts: Parts, block: tuple[int, int] | None = None) -> None:
    """All weights with a ``weight_scale``. ``block``: that of the scales of 8 bits, if there is one."""
    for stem in parts.stems(".weight_scale"):
        if f"{stem}.weight_scale_2" in parts.tensors:
            nvfp4.compose_modelopt(parts, stem)
        elif f"{stem}.weight_packed" not in parts.tensors:
            compose_fp8(parts, f"{stem}.weight", f"{stem}.weight_scale", block, ROUNDED)
        elif f"{stem}.weight_global_scale" in parts.tensors:
            nvfp4.compose_packed(parts, stem)
        else:
            mxfp4.compose_packed(parts, stem)
