"""AutoRound (arXiv 2309.05516): integers in GPTQ's or AWQ's layout, as ``packing_format`` says; floats of 4 and 8 bits as
compressed-tensors has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import FormatError
from engine.formats.quantized import awq, gptq
from engine.formats.quantized.parts import Parts
from engine.formats.quantized.short_floats import compose_floats


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    named = settings.get("packing_format", settings.get("backend"))
    if named in (None, "auto"):
        named = "auto_round:auto_gptq"  # which the first versions did not name
    packing = named if isinstance(named, str) else ""
    if "awq" in packing:
        awq.compose(settings, parts)
    elif "gptq" in packing:
        gptq.compose(settings, parts)
    elif "fp" in packing:
        compose_floats(parts)
    else:
        raise FormatError(
            f"quantization_config has the packing_format {named!r}; supported are auto_round:auto_gptq,"
            " auto_round:auto_awq, and those of fp8, nv_fp4 and mx_fp4."
        )
