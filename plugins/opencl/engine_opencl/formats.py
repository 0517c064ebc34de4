"""Stored blocks as integer codes: weight = scale * (code - offset) + minimum, exactly as the format says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.backend.v1 import Array

Parts = tuple[Array, Array, Array | None]
"""Of blocks: codes [n, block], f32 scales [n, block / group], f32 minimums of that shape or None."""


@dataclass(frozen=True)
class Format:
    """``size``: bytes of a block; ``bits`` of a code: 4, unsigned, or 8, signed; ``group`` weights have a ``scale``, which is
    kept as half where that holds it, else as float."""

    size: int
    bits: int
    group: int
    scale: str
    decode: Callable[[Array], Parts]
    offset: int = 0
    minimum: bool = False


def _cut(blocks: Array, *widths: int) -> list[Array]:
    """Parts of blocks by their widths; the last takes what is left."""
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(widths), axis=1)]


def _f16(part: Array) -> Array:
    return part.view("<f2").astype(np.float32)


def _bits(part: Array, width: int, run: int) -> Array:
    """Fields of ``width`` bits of bytes [n, m]: of each ``run`` bytes first the lowest of all, then the next ones."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (part.reshape(len(part), -1, 1, run) >> shifts & np.uint8(2**width - 1)).reshape(len(part), -1)


def _fours(blocks: Array, minimum: bool = False, zero: bool = False) -> Parts:
    scale, least, codes = _cut(blocks, 2, 2 * minimum + zero)
    scale = _f16(scale)
    return _bits(codes, 4, 16), scale, _f16(least) if minimum else -scale * least if zero else None


def _fives(blocks: Array, minimum: bool) -> Parts:
    scale, least, high, low = _cut(blocks, 2, 2 * minimum, 4)
    codes = (_bits(low, 4, 16) | np.unpackbits(high, axis=1, bitorder="little") << 4).view(np.int8)
    return codes - np.int8(0 if minimum else 16), _f16(scale), _f16(least) if minimum else None


def _eights(blocks: Array, dtype: str) -> Parts:
    scale, codes = _cut(blocks, np.dtype(dtype).itemsize)
    return codes.view(np.int8), scale.view(dtype).astype(np.float32), None


def _q4_k(blocks: Array, fifth: bool = False) -> Parts:
    """Q4_K, or Q5_K with a fifth bit. Eight scales and minimums of six bits each lie in twelve bytes."""
    d, least, first, second, rest, high, low = _cut(blocks, 2, 2, 4, 4, 4, 32 * fifth)
    factor = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minimum = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    codes = (_bits(low, 4, 32) | _bits(high, 1, 32) << 4).view(np.int8) if fifth else _bits(low, 4, 32)
    return codes, _f16(d) * factor, -_f16(least) * minimum


def _q6_k(blocks: Array) -> Parts:
    low, high, scales, d = _cut(blocks, 128, 64, 16)
    codes = (_bits(low, 4, 64) | _bits(high, 2, 32) << 4).view(np.int8) - np.int8(32)
    return codes, _f16(d) * scales.view(np.int8), None


FORMATS = {
    "Q4_0": Format(18, 4, 32, "half", _fours, offset=8),
    "Q4_1": Format(20, 4, 32, "half", partial(_fours, minimum=True), minimum=True),
    "W4Z": Format(19, 4, 32, "float", partial(_fours, zero=True), minimum=True),
    "Q5_0": Format(22, 8, 32, "half", partial(_fives, minimum=False)),
    "Q5_1": Format(24, 8, 32, "half", partial(_fives, minimum=True), minimum=True),
    "Q8_0": Format(34, 8, 32, "half", partial(_eights, dtype="<f2")),
    "W8S": Format(36, 8, 32, "float", partial(_eights, dtype="<f4")),
    "Q4_K": Format(144, 4, 32, "float", _q4_k, minimum=True),
    "Q5_K": Format(176, 8, 32, "float", partial(_q4_k, fifth=True), minimum=True),
    "Q6_K": Format(210, 8, 16, "float", _q6_k),
}
"""The formats whose products take 8-bit activations."""
