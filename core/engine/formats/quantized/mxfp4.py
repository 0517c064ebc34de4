"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss has it: the experts of a layer in one weight.

A weight [experts, N, K] has blocks u8 [experts, N, K / 32, 16], whose byte j holds the numbers 2j and 2j + 1, and scales u8
[experts, N, K / 32]. ggml's block is the scale before 16 bytes of the numbers j and j + 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.formats.checkpoint import ComposedTensor
from engine.formats.quantformats import FORMATS, Bytes
from engine.formats.quantized.parts import Parts

_BLOCK = 32
_HALF = _BLOCK // 2


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    """No setting changes what the stored numbers are."""
    for stem in parts.stems("_blocks"):
        _compose(parts, stem)


def _compose(parts: Parts, stem: str) -> None:
    scales = parts.take(f"{stem}_scales", ("U8",), (None, None, None))
    blocks = parts.take(f"{stem}_blocks", ("U8",), (*scales.shape, _HALF))
    experts, rows, groups = scales.shape

    def read(start: int, stop: int) -> Bytes:
        pairs = blocks.data.reshape(-1, groups, _HALF)[start:stop]
        numbers = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), groups, _BLOCK)
        packed = numbers[..., :_HALF] | numbers[..., _HALF:] << 4
        scale = scales.data.reshape(-1, groups, 1)[start:stop]
        return np.concatenate([scale, packed], axis=-1).reshape(len(pairs), -1)

    shape = (experts, rows, groups * _BLOCK)
    parts.put(ComposedTensor(stem, shape, FORMATS["MXFP4"], parts=(blocks, scales), read=read))
