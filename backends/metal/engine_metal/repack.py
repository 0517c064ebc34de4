"""Quantized formats as MLX's affine groups: number = scale * code + bias, with f32 scales and biases. MXFP4 is MLX's own.

The codes are the format's own numbers, made unsigned, so that nothing is rounded but what the format's own decoder rounds: d
and the integers beside it have few enough bits for scale and bias, and for their product with a code, to be f32 numbers. The
exceptions are IQ4_XS and W8S, whose products have 25 and 30 bits: there a number may be off by a unit in the last place of the
group's largest. Formats with another rule than this one (grids, tables that are no small integers, E4M3) are left dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.backend.v1 import Array

GROUP = 32
Parts = tuple[Array, Array, Array | None]


@dataclass(frozen=True)
class Form:
    """``split(rows)``: codes u8 [rows, K], scales and biases f32 [rows, groups]; of the ``mode`` mxfp4 E8M0 scales, u8, and no
    biases. ``spread``: groups are of 16."""

    bits: int
    split: Callable[[Array], Parts]
    spread: bool = False
    mode: str = "affine"


def packed_codes(codes: Array, form: Form) -> Array:
    """Codes u8 [rows, K] as u32 words, lowest bits first; spread out, with zeros behind each 16, where the form says so."""
    if form.spread:
        groups = codes.reshape(len(codes), -1, GROUP // 2)
        codes = np.concatenate([groups, np.zeros_like(groups)], axis=-1).reshape(len(codes), -1)
    if form.bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if form.bits == 4:
        return np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4).view(np.uint32)
    bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=form.bits)
    return np.packbits(bits.reshape(len(codes), -1), axis=-1, bitorder="little").view(np.uint32)


def _fields(rows: Array, *widths: int) -> list[Array]:
    """Blocks [rows, blocks, bytes] cut into fields of these widths."""
    blocks = rows.reshape(len(rows), -1, sum(widths))
    ends = np.cumsum([0, *widths])
    return [np.ascontiguousarray(blocks[..., a:b]) for a, b in pairwise(ends)]


def _f16(field: Array) -> Array:
    return field.view(np.float16).astype(np.float32)


def _row(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1))


def _parts(codes: Array, scales: Array, biases: Array) -> Parts:
    return _row(codes).astype(np.uint8), _row(scales), _row(biases)


def _nibbles(qs: Array) -> Array:
    """Low nibbles, then high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _high_bits(qh: Array) -> Array:
    """32 bits as fives' highest: u8 [..., 32] of 0 or 16."""
    return np.unpackbits(qh, axis=-1, bitorder="little") << 4


def _q4_0(rows: Array) -> Parts:
    d, qs = _fields(rows, 2, 16)
    return _parts(_nibbles(qs), _f16(d), -8 * _f16(d))


def _q4_1(rows: Array) -> Parts:
    d, m, qs = _fields(rows, 2, 2, 16)
    return _parts(_nibbles(qs), _f16(d), _f16(m))


def _q5_0(rows: Array) -> Parts:
    d, qh, qs = _fields(rows, 2, 4, 16)
    return _parts(_nibbles(qs) | _high_bits(qh), _f16(d), -16 * _f16(d))


def _q5_1(rows: Array) -> Parts:
    d, m, qh, qs = _fields(rows, 2, 2, 4, 16)
    return _parts(_nibbles(qs) | _high_bits(qh), _f16(d), _f16(m))


def _q8_0(rows: Array) -> Parts:
    d, qs = _fields(rows, 2, 32)
    return _parts(qs ^ 128, _f16(d), -128 * _f16(d))


def _six_bit_pairs(packed: Array) -> tuple[Array, Array]:
    """The eight scales and eight minima of Q4_K and Q5_K, six bits each, of twelve bytes."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
    minima = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_nibbles(qs: Array) -> Array:
    """Each 32 bytes of a superblock of 256: 32 low nibbles, then 32 high ones."""
    return _nibbles(qs.reshape(*qs.shape[:-1], 4, 32)).reshape(*qs.shape[:-1], 256)


def _q4_k(rows: Array) -> Parts:
    d, least, packed, qs = _fields(rows, 2, 2, 12, 128)
    scales, minima = _six_bit_pairs(packed)
    return _parts(_k_nibbles(qs), _f16(d) * scales, -_f16(least) * minima)


def _q5_k(rows: Array) -> Parts:
    d, least, packed, qh, qs = _fields(rows, 2, 2, 12, 32, 128)
    scales, minima = _six_bit_pairs(packed)
    # Bit n of byte j belongs to number 32 n + j.
    high = (qh[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    codes = _k_nibbles(qs) | high.reshape(*qh.shape[:-1], 256)
    return _parts(codes, _f16(d) * scales, -_f16(least) * minima)


def _twos(qs: Array) -> Array:
    """Each 32 bytes hold 128 numbers of two bits: the lowest two of all, then the next two, and so on."""
    parts = qs.reshape(*qs.shape[:-1], -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return parts.reshape(*qs.shape[:-1], -1)


def _q6_k(rows: Array) -> Parts:
    ql, qh, packed, d = _fields(rows, 128, 64, 16, 2)
    low = ql.reshape(*ql.shape[:-1], 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    codes = low.reshape(*ql.shape[:-1], 256) | _twos(qh) << 4
    scales = _f16(d) * packed.view(np.int8).astype(np.float32)
    return _parts(codes, scales, -32 * scales)


def _q2_k(rows: Array) -> Parts:
    packed, qs, d, least = _fields(rows, 16, 64, 2, 2)
    scales, minima = (part.astype(np.float32) for part in (packed & 15, packed >> 4))
    return _parts(_twos(qs), _f16(d) * scales, -_f16(least) * minima)


def _q3_k(rows: Array) -> Parts:
    hmask, qs, packed, d = _fields(rows, 32, 64, 12, 2)
    high = (hmask[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 2
    codes = _twos(qs) | high.reshape(*qs.shape[:-1], 256)
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    top = packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    sixes = low | top.reshape(*low.shape) << 4
    scales = _f16(d) * (sixes.astype(np.float32) - 32)
    return _parts(codes, scales, -4 * scales)


def _tq2_0(rows: Array) -> Parts:
    qs, d = _fields(rows, 64, 2)
    scales = np.repeat(_f16(d), 8, axis=-1)
    return _parts(_twos(qs), scales, -scales)


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
_IQ4_CODES = (_IQ4 + 128).astype(np.uint8)


def _iq4_nl(rows: Array) -> Parts:
    d, qs = _fields(rows, 2, 16)
    return _parts(_IQ4_CODES[_nibbles(qs)], _f16(d), -128 * _f16(d))


def _iq4_xs(rows: Array) -> Parts:
    d, high, low, qs = _fields(rows, 2, 2, 4, 128)
    lows = np.stack([low & 15, low >> 4], axis=-1).reshape(*low.shape[:-1], 8)
    highs = high.view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = _f16(d) * ((lows | highs << 4).astype(np.float32) - 32)
    codes = _IQ4_CODES[_nibbles(qs.reshape(*qs.shape[:-1], 8, 16))]
    return _parts(codes, scales, -128 * scales)


def _mxfp4(rows: Array) -> Parts:
    exponent, qs = _fields(rows, 1, 16)
    return _row(_nibbles(qs)), _row(exponent), None


def _w4z(rows: Array) -> Parts:
    d, zero, qs = _fields(rows, 2, 1, 16)
    return _parts(_nibbles(qs), _f16(d), -_f16(d) * zero.astype(np.float32))


def _w8s(rows: Array) -> Parts:
    scale, qs = _fields(rows, 4, 32)
    scales = scale.view(np.float32)
    return _parts(qs ^ 128, scales, -128 * scales)


def _w8m(rows: Array) -> Parts:
    scale, least, qs = _fields(rows, 4, 4, 32)
    return _parts(qs, scale.view(np.float32), -least.view(np.float32))


REPACKED: Mapping[str, Form] = {
    "Q4_0": Form(4, _q4_0),
    "Q4_1": Form(4, _q4_1),
    "Q5_0": Form(5, _q5_0),
    "Q5_1": Form(5, _q5_1),
    "Q8_0": Form(8, _q8_0),
    "Q2_K": Form(2, _q2_k, spread=True),
    "Q3_K": Form(3, _q3_k, spread=True),
    "Q4_K": Form(4, _q4_k),
    "Q5_K": Form(5, _q5_k),
    "Q6_K": Form(6, _q6_k, spread=True),
    "TQ2_0": Form(2, _tq2_0),
    "IQ4_NL": Form(8, _iq4_nl),
    "IQ4_XS": Form(8, _iq4_xs),
    "MXFP4": Form(4, _mxfp4, mode="mxfp4"),
    "W4Z": Form(4, _w4z),
    "W8S": Form(8, _w8s),
    "W8M": Form(8, _w8m),
}
