"""MXFP4 (OCP Microscaling Formats 1.0).

As gpt-oss has it the experts of a layer are one weight [experts, N, K], with blocks u8 [experts, N, K / 32, 16] and scales u8
[experts, N, K / 32]; as compressed-tensors does a module [N, K] has weight_packed u8 [N, K / 2] and weight_scale u8 [N, K / 32].
Byte j of 32 numbers holds 2j, low, and 2j + 1. ggml's block is the scale before 16 bytes of the numbers j and j + 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.formats.checkpoint import ComposedTensor, Tensor
from engine.formats.quantformats import FORMATS, Bytes
from engine.formats.quantized.blocks import BLOCK, by_halves, in_turn, row
from engine.formats.quantized.parts import Parts

_HALF = BLOCK // 2
_SCALES = ("U8", "F8_E8M0")
"""Two names of the same bytes."""


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    """No setting changes what the stored numbers are."""
    for stem in parts.stems("_blocks"):
        scales = parts.take(f"{stem}_scales", _SCALES, (None, None, None))
        parts.put(composed(stem, parts.take(f"{stem}_blocks", ("U8",), (*scales.shape, _HALF)), scales))


def compose_packed(parts: Parts, stem: str) -> None:
    """The weight of the module ``stem``, of compressed-tensors."""
    scales = parts.take(f"{stem}.weight_scale", _SCALES, (None, None))
    packed = parts.take(f"{stem}.weight_packed", ("U8",), (scales.shape[0], scales.shape[1] * _HALF))
    parts.put(composed(f"{stem}.weight", packed, scales))


def composed(name: str, blocks: Tensor, scales: Tensor) -> ComposedTensor:
    """Scales of any shape [.., K / 32], and the numbers' bytes in the same order."""
    groups = scales.shape[-1]

    def read(start: int, stop: int) -> Bytes:
        packed = blocks.data.reshape(-1, groups * _HALF)[start:stop]
        scale = scales.data.reshape(-1, groups, 1)[start:stop]
        return row(scale, by_halves(in_turn(packed).reshape(-1, groups, BLOCK)))

    shape = (*scales.shape[:-1], groups * BLOCK)
    return ComposedTensor(name, shape, FORMATS["MXFP4"], parts=(blocks, scales), read=read)
