"""Quantized formats as codes of 4 or 8 bits and factors of groups of columns, exactly:

    number = (code - zero) * scale - least        or        table[code] * scale

A scale (and a least) is one number for each ``super`` columns, and where the format has superblocks times a small integer for
each ``group``: kept apart, since their product has more bits than an f16 number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from engine.backend.v1 import Array, codebook


@dataclass(frozen=True)
class Parts:
    """Of some rows: codes u8 [rows, K]; scale f16 or f32 [rows, K / super]; the integers beside it [rows, K / group]; the same
    of what is subtracted."""

    codes: Array
    scale: Array
    fine_scale: Array | None = None
    least: Array | None = None
    fine_least: Array | None = None


@dataclass(frozen=True)
class Form:
    """How a format is taken apart. ``table``: the numbers that codes stand for; ``e4m3``: those of fp8."""

    bits: int
    group: int
    super: int
    split: Callable[[Array], Parts]
    zero: int = 0
    table: Array | None = None
    e4m3: bool = False
    codes: int = 0

    @property
    def below(self) -> int:
        """What all codes are smaller than."""
        return self.codes or 1 << self.bits

    @cached_property
    def meaning(self) -> str:
        """What a code is: a number ("codes"), one of "e4m3", or an index of a table of int8 ("bytes") or of other "numbers"."""
        if self.table is None or self.e4m3:
            return "e4m3" if self.e4m3 else "codes"
        return "bytes" if bool((self.table == self.table.astype(np.int8)).all()) else "numbers"

    @property
    def few(self) -> bool:
        """Whether few rows are multiplied by ``kernels.few``."""
        return not self.e4m3

    @cached_property
    def constant(self) -> int:
        """The table as one integer, its first number lowest; 0 where codes need none."""
        if self.table is None or self.e4m3:
            return 0
        numbers = self.table.astype(np.int8) if self.meaning == "bytes" else self.table
        return int.from_bytes(numbers.tobytes(), "little")


def _fields(rows: Array, *widths: int) -> list[Array]:
    """Blocks [rows, blocks, bytes] cut into fields of these widths."""
    blocks = rows.reshape(len(rows), -1, sum(widths))
    ends = np.cumsum([0, *widths])
    return [np.ascontiguousarray(blocks[..., a:b]) for a, b in pairwise(ends)]


def _row(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1))


def _f16(field: Array) -> Array:
    return _row(field.view(np.float16))


def _nibbles(qs: Array) -> Array:
    """Low nibbles, then high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _high_bits(qh: Array) -> Array:
    """32 bits as fives' highest: u8 [..., 32] of 0 or 16."""
    return np.unpackbits(qh, axis=-1, bitorder="little") << 4


def _q4_0(rows: Array) -> Parts:
    d, qs = _fields(rows, 2, 16)
    return Parts(_row(_nibbles(qs)), _f16(d))


def _q4_1(rows: Array) -> Parts:
    d, m, qs = _fields(rows, 2, 2, 16)
    return Parts(_row(_nibbles(qs)), _f16(d), least=-_f16(m))


def _q5_0(rows: Array) -> Parts:
    d, qh, qs = _fields(rows, 2, 4, 16)
    return Parts(_row(_nibbles(qs) | _high_bits(qh)), _f16(d))


def _q5_1(rows: Array) -> Parts:
    d, m, qh, qs = _fields(rows, 2, 2, 4, 16)
    return Parts(_row(_nibbles(qs) | _high_bits(qh)), _f16(d), least=-_f16(m))


def _q8_0(rows: Array) -> Parts:
    d, qs = _fields(rows, 2, 32)
    return Parts(_row(qs ^ 128), _f16(d))


def _six_bit_pairs(packed: Array) -> tuple[Array, Array]:
    """The eight scales and eight minima of Q4_K and Q5_K, six bits each, of twelve bytes."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
    minima = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
    return _row(scales), _row(minima)


def _k_nibbles(qs: Array) -> Array:
    """Each 32 bytes of a superblock of 256: 32 low nibbles, then 32 high ones."""
    return _nibbles(qs.reshape(*qs.shape[:-1], 4, 32)).reshape(*qs.shape[:-1], 256)


def _q4_k(rows: Array) -> Parts:
    d, least, packed, qs = _fields(rows, 2, 2, 12, 128)
    scales, minima = _six_bit_pairs(packed)
    return Parts(_row(_k_nibbles(qs)), _f16(d), scales, _f16(least), minima)


def _q5_k(rows: Array) -> Parts:
    d, least, packed, qh, qs = _fields(rows, 2, 2, 12, 32, 128)
    scales, minima = _six_bit_pairs(packed)
    # Bit n of byte j belongs to number 32 n + j.
    high = (qh[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    codes = _k_nibbles(qs) | high.reshape(*qh.shape[:-1], 256)
    return Parts(_row(codes), _f16(d), scales, _f16(least), minima)


def _twos(qs: Array) -> Array:
    """Each 32 bytes hold 128 numbers of two bits: the lowest two of all, then the next two, and so on."""
    parts = qs.reshape(*qs.shape[:-1], -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return parts.reshape(*qs.shape[:-1], -1)


def _q6_k(rows: Array) -> Parts:
    ql, qh, packed, d = _fields(rows, 128, 64, 16, 2)
    low = ql.reshape(*ql.shape[:-1], 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    codes = low.reshape(*ql.shape[:-1], 256) | _twos(qh) << 4
    return Parts(_row(codes), _f16(d), _row(packed.view(np.int8)))


def _q2_k(rows: Array) -> Parts:
    packed, qs, d, least = _fields(rows, 16, 64, 2, 2)
    return Parts(_row(_twos(qs)), _f16(d), _row(packed & 15), _f16(least), _row(packed >> 4))


def _q3_k(rows: Array) -> Parts:
    hmask, qs, packed, d = _fields(rows, 32, 64, 12, 2)
    high = (hmask[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 2
    codes = _twos(qs) | high.reshape(*qs.shape[:-1], 256)
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    top = packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (low | top.reshape(*low.shape) << 4).astype(np.int8) - np.int8(32)
    return Parts(_row(codes), _f16(d), _row(scales))


def _tq2_0(rows: Array) -> Parts:
    qs, d = _fields(rows, 64, 2)
    return Parts(_row(_twos(qs)), _f16(d))


def _iq4_nl(rows: Array) -> Parts:
    d, qs = _fields(rows, 2, 16)
    return Parts(_row(_nibbles(qs)), _f16(d))


def _pairs(field: Array) -> Array:
    """Two numbers of four bits a byte, the low one first."""
    return np.stack([field & 15, field >> 4], axis=-1).reshape(*field.shape[:-1], -1)


def _iq4_xs(rows: Array) -> Parts:
    d, high, low, qs = _fields(rows, 2, 2, 4, 128)
    lows = _pairs(low)
    highs = (high.view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    scales = (lows | highs << 4).astype(np.int8) - np.int8(32)
    return Parts(_row(_nibbles(qs.reshape(*qs.shape[:-1], 8, 16))), _f16(d), _row(scales))


def _of_codebook(format_: str, index: Array, signs: Array) -> Array:
    """Codes u8 [rows, K]: the numbers of the entries ``index`` [..., n], and behind them one bit for each, [..., numbers]."""
    numbers = 4 if format_.startswith("IQ3") else 8
    entries: Array = codebook(format_)[index][..., None] >> np.arange(0, 4 * numbers, 4, dtype=np.uint32) & 15
    return _row(entries.astype(np.uint8).reshape(*signs.shape) | (signs << 3).astype(np.uint8))


def _bits(field: Array, count: int) -> Array:
    """The lowest bits of each number, [..., numbers * count]."""
    bits: Array = field[..., None] >> np.arange(count, dtype=field.dtype) & 1
    return bits.reshape(*field.shape[:-1], -1)


def _even(sevens: Array) -> Array:
    """Seven signs and an eighth that makes their number even, of each number."""
    seven = (sevens & 127).astype(np.uint8)
    eighth = np.bitwise_xor.reduce(seven[..., None] >> np.arange(7, dtype=np.uint8) & 1, axis=-1)
    return _bits(seven | eighth << 7, 8)


def _odd(scales: Array) -> Array:
    return _row((2 * scales + 1).astype(np.uint8))


def _factor(field: Array, share: float) -> Array:
    return _f16(field).astype(np.float32) * np.float32(share)


def _iq2_xxs(rows: Array) -> Parts:
    d, groups = _fields(rows, 2, 64)
    rest = np.ascontiguousarray(groups.reshape(*groups.shape[:-1], 8, 8)[..., 4:]).view(np.uint32)[..., 0]
    index = groups.reshape(*groups.shape[:-1], 8, 8)[..., :4].reshape(*groups.shape[:-1], 32)
    signs = _even((rest[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)).reshape(*rest.shape[:-1], 32))
    return Parts(_of_codebook("IQ2_XXS", index, signs), _factor(d, 0.125), _odd(rest >> 28))


def _iq2_xs(rows: Array) -> Parts:
    d, qs, scales = _fields(rows, 2, 64, 8)
    q = qs.view(np.uint16)
    return Parts(_of_codebook("IQ2_XS", q & 511, _even(q >> 9)), _factor(d, 0.125), _odd(_pairs(scales)))


def _iq2_s(rows: Array) -> Parts:
    d, qs, signs, high, scales = _fields(rows, 2, 32, 32, 8, 8)
    more = high[..., None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    index = qs | more.reshape(*qs.shape).astype(np.uint16) << 8
    return Parts(_of_codebook("IQ2_S", index, _bits(signs, 8)), _factor(d, 0.125), _odd(_pairs(scales)))


def _iq3_xxs(rows: Array) -> Parts:
    d, qs, packed = _fields(rows, 2, 64, 32)
    rest = packed.view(np.uint32)
    signs = _even((rest[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)).reshape(*rest.shape[:-1], 32))
    return Parts(_of_codebook("IQ3_XXS", qs, signs), _factor(d, 0.25), _odd(rest >> 28))


def _iq3_s(rows: Array) -> Parts:
    d, qs, high, signs, scales = _fields(rows, 2, 64, 8, 32, 4)
    index = qs | _bits(high, 8).astype(np.uint16) << 8
    return Parts(_of_codebook("IQ3_S", index, _bits(signs, 8)), _factor(d, 1), _odd(_pairs(scales)))


def _iq1_s(rows: Array) -> Parts:
    d, qs, packed = _fields(rows, 2, 32, 16)
    rest = packed.view(np.uint16)
    more = (rest[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(*qs.shape)
    less = np.repeat(rest >> 15, 32, axis=-1)
    return Parts(_of_codebook("IQ1_S", qs | more << 8, less), _factor(d, 0.125), _odd(rest >> 12 & 7))


def _iq1_m(rows: Array) -> Parts:
    qs, high, packed = _fields(rows, 32, 16, 8)
    words = packed.view(np.uint16)
    d = np.bitwise_or.reduce((words >> 12) << np.arange(0, 16, 4, dtype=np.uint16), axis=-1).view(np.float16)
    rest = _pairs(high)
    scales = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(*words.shape[:-1], 16)
    less = np.repeat(rest >> 3, 8, axis=-1)
    index = qs | (rest & 7).astype(np.uint16) << 8
    return Parts(_of_codebook("IQ1_M", index, less), d.astype(np.float32) * np.float32(0.125), _odd(scales))


def _tq1_0(rows: Array) -> Parts:
    qs, high, d = _fields(rows, 48, 4, 2)

    def digits(field: Array, count: int) -> Array:
        powers = np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
        digit: Array = (field[..., None, :] * powers).astype(np.uint16) * 3 >> 8
        return digit.reshape(*field.shape[:-1], -1)

    codes = np.concatenate([digits(qs[..., :32], 5), digits(qs[..., 32:], 5), digits(high, 4)], axis=-1)
    return Parts(_row(codes.astype(np.uint8)), _f16(d))


def _mxfp4(rows: Array) -> Parts:
    exponent, qs = _fields(rows, 1, 16)
    # Half of E8M0's power of two, since the table has twice the numbers.
    scales = np.ldexp(np.float32(1), exponent.astype(np.int32) - 128).astype(np.float32)
    return Parts(_row(_nibbles(qs)), _row(scales))


def _w4z(rows: Array) -> Parts:
    d, zero, qs = _fields(rows, 2, 1, 16)
    scale = _f16(d)
    return Parts(_row(_nibbles(qs)), scale, least=scale.astype(np.float32) * _row(zero))


def _w8s(rows: Array) -> Parts:
    scale, qs = _fields(rows, 4, 32)
    return Parts(_row(qs ^ 128), _row(scale.view(np.float32)))


def _w8m(rows: Array) -> Parts:
    scale, least, qs = _fields(rows, 4, 4, 32)
    return Parts(_row(qs), _row(scale.view(np.float32)), least=_row(least.view(np.float32)))


def _fp8(rows: Array) -> Parts:
    scale, codes = _fields(rows, 4, 32)
    return Parts(_row(codes), _row(scale.view(np.float32)))


def _pairs_of_64(rows: Array) -> Parts:
    scale, qs = _fields(rows, 4, 32)
    codes = np.stack([qs >> 4, qs & 15], axis=-1)
    return Parts(_row(codes), _row(scale.view(np.float32)))


def _nvfp4s(rows: Array) -> Parts:
    """The scale of a group is half the product of the whole weight's and its own, since the numbers are doubled."""
    scale, fine, qs = _fields(rows, 4, 4, 32)
    own = _e4m3()[fine & 127]
    own[fine == 127], own[fine == 255] = 0, 480  # as ggml takes the codes of NaN
    return Parts(_row(_nibbles(qs.reshape(*qs.shape[:-1], 4, 8))), _row(scale.view(np.float32) / 2 * own))


def _e4m3() -> Array:
    """The numbers of 256 codes: a sign, four bits of exponent with bias 7, three of mantissa; the last of each sign is NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7) / 8
    size = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    return np.where(code & 127 == 127, np.nan, np.where(code > 127, -size, size)).astype(np.float32)


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# Of codebooks: the highest bit of a code is a number's sign, or of IQ1 that of an eighth which is added to it.
_TWOS = np.array([8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0], np.float32)
_THREES = np.array([4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62], np.float32)
_ODDS = np.array([1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15], np.float32)
_ONES = np.array([-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0], np.float32)
# The quantiles of the normal distribution of QLoRA (arXiv 2305.14314), appendix E.
_NF4 = np.array(
    [
        *(
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
        ),
        *(
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
        ),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)

REPACKED: Mapping[str, Form] = {
    "Q4_0": Form(4, 32, 32, _q4_0, 8),
    "Q4_1": Form(4, 32, 32, _q4_1),
    "Q5_0": Form(8, 32, 32, _q5_0, 16, codes=32),
    "Q5_1": Form(8, 32, 32, _q5_1, codes=32),
    "Q8_0": Form(8, 32, 32, _q8_0, 128),
    "Q2_K": Form(4, 16, 256, _q2_k),
    "Q3_K": Form(4, 16, 256, _q3_k, 4),
    "Q4_K": Form(4, 32, 256, _q4_k),
    "Q5_K": Form(8, 32, 256, _q5_k, codes=32),
    "Q6_K": Form(8, 16, 256, _q6_k, 32, codes=64),
    "IQ1_S": Form(4, 32, 256, _iq1_s, table=_ONES),
    "IQ1_M": Form(4, 16, 256, _iq1_m, table=_ONES),
    "IQ2_XXS": Form(4, 32, 256, _iq2_xxs, table=_TWOS),
    "IQ2_XS": Form(4, 16, 256, _iq2_xs, table=_TWOS),
    "IQ2_S": Form(4, 16, 256, _iq2_s, table=_TWOS),
    "IQ3_XXS": Form(4, 32, 256, _iq3_xxs, table=_THREES),
    "IQ3_S": Form(4, 32, 256, _iq3_s, table=_ODDS),
    "TQ1_0": Form(4, 256, 256, _tq1_0, 1),
    "TQ2_0": Form(4, 256, 256, _tq2_0, 1),
    "IQ4_NL": Form(4, 32, 32, _iq4_nl, table=_IQ4),
    "IQ4_XS": Form(4, 32, 256, _iq4_xs, table=_IQ4),
    "MXFP4": Form(4, 32, 32, _mxfp4, table=_E2M1),
    "NVFP4S": Form(4, 16, 16, _nvfp4s, table=_E2M1),
    "W4Z": Form(4, 32, 32, _w4z),
    "W8S": Form(8, 32, 32, _w8s, 128),
    "W8M": Form(8, 32, 32, _w8m),
    "FP8": Form(8, 32, 32, _fp8, table=_e4m3(), e4m3=True),
    "NF4": Form(4, 64, 64, _pairs_of_64, table=_NF4),
    "FP4": Form(4, 64, 64, _pairs_of_64, table=np.concatenate([_FP4, -_FP4])),
}


TILE = 32
"""Rows of which there are whole tiles, where codes and factors lie as NVIDIA's matrix instructions take them."""
# Of 32 columns' numbers 16 hi + 4 lane + 2 pair + next (4 together) or 16 hi + 8 pair + 2 lane + next (2 together): how many of
# hi, pair, lane and next there are, in that order, and where among them lane, next, hi and pair are.
_PLACES = {4: ((2, 4, 2, 2), (1, 3, 0, 2)), 2: ((2, 2, 4, 2), (2, 3, 0, 1))}


def _order(bits: int, together: int) -> list[int]:
    """Of axes [tiles, 2 times, 8 rows, parts of columns, the four of _PLACES] those of memory."""
    lane, next_, hi, pair = (4 + axis for axis in _PLACES[together][1])
    return [0, 3, 2, lane, 1, next_, hi, pair] if bits == 4 else [0, 3, 2, lane, 1, hi, next_, pair]


def packed_codes(codes: Array, bits: int, together: int = 0) -> Array:
    """Codes u8 [rows, K] as bytes, zeros beyond K. Of 4 bits a byte has those of columns 64 i + j, low, and 64 i + 32 + j. Or
    with ``together``, 2 or 4, [tiles of 16 rows, bytes], an even number of them: 32 columns after the other, of which each of 32
    lanes of NVIDIA's matrix instructions has its part of rows r and r + 8 beside each other. It has as many columns
    ``together``, of which two that are neighbours are 16 bits apart in a word."""
    if bits == 8 and not together:
        return codes
    rows, depth = codes.shape
    height, width = (TILE, 32) if together else (1, 64)
    padded = np.zeros((-(-rows // height) * height, -(-depth // width) * width), np.uint8)
    padded[:rows, :depth] = codes
    if together:
        lanes = padded.reshape(-1, 2, 8, padded.shape[1] // 32, *_PLACES[together][0]).transpose(_order(bits, together))
        packed = lanes if bits == 8 else lanes[..., 0] | lanes[..., 1] << 4
        return np.ascontiguousarray(packed).reshape(len(lanes), -1)
    pairs = padded.reshape(rows, -1, 2, 32)
    return np.ascontiguousarray(pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, -1)


def plain_codes(packed: Array, bits: int, rows: int, depth: int, together: int = 0) -> Array:
    """What ``packed_codes`` was given."""
    if bits == 8 and not together:
        return packed
    if together:
        codes = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1)
        order = _order(bits, together)
        sizes = np.array([len(packed), 2, 8, -(-depth // 32), *_PLACES[together][0]])
        plain = codes.reshape(sizes[order]).transpose(np.argsort(order))
        return np.ascontiguousarray(plain.reshape(len(packed) * 16, -1)[:rows, :depth])
    bytes_ = packed.reshape(len(packed), -1, 1, 32)
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=2).reshape(len(packed), -1)[:, :depth]


def tiled(factors: Array) -> Array:
    """Factors [rows, groups] of codes that lie in tiles, [tiles, groups * 32]: a group after the other, of which each lane has
    those of its four rows beside each other. Zeros beyond the last row."""
    rows, groups = factors.shape
    padded = np.zeros((-(-rows // TILE) * TILE, groups), factors.dtype)
    padded[:rows] = factors
    return np.ascontiguousarray(padded.reshape(-1, 4, 8, groups).transpose(0, 3, 2, 1)).reshape(-1, groups * TILE)


def untiled(factors: Array, rows: int) -> Array:
    """What ``tiled`` was given."""
    groups = factors.shape[1] // TILE
    plain = factors.reshape(-1, groups, 8, 4).transpose(0, 3, 2, 1)
    return np.ascontiguousarray(plain.reshape(-1, groups)[:rows])
