"""Stored blocks as integer codes: weight = scale * (code - offset) + minimum, exactly as the format says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.backend.v1 import Array

Parts = tuple[Array, Array, Array | None]
"""Codes [rows, K], f32 scales [rows, K / group], f32 minimums of that shape or None."""

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True)
class Format:
    """``bits`` of a code: 4, unsigned, less ``offset``; or 8, signed. ``group`` weights have a scale, stored as f16 where
    that holds it."""

    bits: int
    group: int
    half: bool
    decode: Callable[[Array], Parts]
    offset: int = 0
    minimum: bool = False


def _cut(blocks: Array, *widths: int) -> list[Array]:
    """Parts of blocks [n, bytes] by their widths; the last takes what is left."""
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(widths), axis=1)]


def _f16(part: Array) -> Array:
    return part.view("<f2").astype(np.float32)


def _bits(part: Array, width: int, run: int) -> Array:
    """Fields of ``width`` bits of bytes [n, m]: of each ``run`` bytes first the lowest of all, then the next ones."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields = part.reshape(len(part), -1, 1, run) >> shifts & np.uint8(2**width - 1)
    return fields.reshape(len(part), -1)


def _q4_0(blocks: Array) -> Parts:
    scale, codes = _cut(blocks, 2)
    return _bits(codes, 4, 16), _f16(scale), None


def _q4_1(blocks: Array) -> Parts:
    scale, minimum, codes = _cut(blocks, 2, 2)
    return _bits(codes, 4, 16), _f16(scale), _f16(minimum)


def _fifth(high: Array, low: Array) -> Array:
    bits = np.unpackbits(high, axis=1, bitorder="little")
    return (_bits(low, 4, 16) | bits << 4).view(np.int8)


def _q5_0(blocks: Array) -> Parts:
    scale, high, low = _cut(blocks, 2, 4)
    return _fifth(high, low) - np.int8(16), _f16(scale), None


def _q5_1(blocks: Array) -> Parts:
    scale, minimum, high, low = _cut(blocks, 2, 2, 4)
    return _fifth(high, low), _f16(scale), _f16(minimum)


def _q8_0(blocks: Array) -> Parts:
    scale, codes = _cut(blocks, 2)
    return codes.view(np.int8), _f16(scale), None


def _q2_k(blocks: Array) -> Parts:
    scales, codes, d, least = _cut(blocks, 16, 64, 2)
    return _bits(codes, 2, 32), _f16(d) * (scales & 15), -_f16(least) * (scales >> 4)


def _q3_k(blocks: Array) -> Parts:
    high, low, scales, d = _cut(blocks, 32, 64, 12)
    sixes = _bits(scales[:, :8], 4, 8) | _bits(scales[:, 8:], 2, 4) << 4
    return _bits(low, 2, 32) | _bits(high, 1, 32) << 2, _f16(d) * (sixes.astype(np.float32) - 32), None


def _k_scales(d: Array, least: Array, scales: Array) -> tuple[Array, Array]:
    """The eight scales and minimums of a superblock, of six bits each."""
    first, second, rest = np.split(scales, 3, axis=1)
    factor = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minimum = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    return _f16(d) * factor, -_f16(least) * minimum


def _q4_k(blocks: Array) -> Parts:
    d, least, scales, codes = _cut(blocks, 2, 2, 12)
    return _bits(codes, 4, 32), *_k_scales(d, least, scales)


def _q5_k(blocks: Array) -> Parts:
    d, least, scales, high, low = _cut(blocks, 2, 2, 12, 32)
    return (_bits(low, 4, 32) | _bits(high, 1, 32) << 4).view(np.int8), *_k_scales(d, least, scales)


def _q6_k(blocks: Array) -> Parts:
    low, high, scales, d = _cut(blocks, 128, 64, 16)
    codes = (_bits(low, 4, 64) | _bits(high, 2, 32) << 4).view(np.int8)
    return codes - np.int8(32), _f16(d) * scales.view(np.int8), None


def _iq4_nl(blocks: Array) -> Parts:
    scale, codes = _cut(blocks, 2)
    return _IQ4[_bits(codes, 4, 16)], _f16(scale), None


def _iq4_xs(blocks: Array) -> Parts:
    d, high, low, codes = _cut(blocks, 2, 2, 4)
    sixes = _bits(low, 4, 1) | _bits(high, 2, 1) << 4
    return _IQ4[_bits(codes, 4, 16)], _f16(d) * (sixes.astype(np.float32) - 32), None


def _mxfp4(blocks: Array) -> Parts:
    exponent, codes = _cut(blocks, 1)
    return _FP4[_bits(codes, 4, 16)], np.ldexp(np.float32(1), exponent.astype(np.int32) - 128), None


def _w4z(blocks: Array) -> Parts:
    scale, zero, codes = _cut(blocks, 2, 1)
    return _bits(codes, 4, 16), _f16(scale), -_f16(scale) * zero


def _w8s(blocks: Array) -> Parts:
    scale, codes = _cut(blocks, 4)
    return codes.view(np.int8), scale.view("<f4"), None


FORMATS = {
    "Q4_0": Format(4, 32, True, _q4_0, offset=8),
    "Q4_1": Format(4, 32, True, _q4_1, minimum=True),
    "Q5_0": Format(8, 32, True, _q5_0),
    "Q5_1": Format(8, 32, True, _q5_1, minimum=True),
    "Q8_0": Format(8, 32, True, _q8_0),
    "Q2_K": Format(4, 16, False, _q2_k, minimum=True),
    "Q3_K": Format(4, 16, False, _q3_k, offset=4),
    "Q4_K": Format(4, 32, False, _q4_k, minimum=True),
    "Q5_K": Format(8, 32, False, _q5_k, minimum=True),
    "Q6_K": Format(8, 16, False, _q6_k),
    "IQ4_NL": Format(8, 32, True, _iq4_nl),
    "IQ4_XS": Format(8, 32, False, _iq4_xs),
    "MXFP4": Format(8, 32, False, _mxfp4),
    "W4Z": Format(4, 32, False, _w4z, minimum=True),
    "W8S": Format(8, 32, False, _w8s),
}
"""The formats whose products take 8-bit activations."""
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q2_K": 84, "Q3_K": 110, "Q4_K": 144}
BLOCK_BYTES |= {"Q5_K": 176, "Q6_K": 210, "IQ4_NL": 18, "IQ4_XS": 136, "MXFP4": 17, "W4Z": 19, "W8S": 36}


def codes_of(format_: str, raw: Array) -> Parts:
    """Raw rows uint8 [rows, bytes] in parts."""
    codes, scale, minimum = FORMATS[format_].decode(raw.reshape(-1, BLOCK_BYTES[format_]))
    rows = len(raw)
    return codes.reshape(rows, -1), scale.reshape(rows, -1), None if minimum is None else minimum.reshape(rows, -1)
