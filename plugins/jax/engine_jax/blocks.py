"""The blocks of GGUF's formats taken apart: codes, and a scale and an offset for each group of them. The layouts are ggml's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from engine.backend.v1 import Array


@dataclass(frozen=True)
class Codes:
    """Of rows [rows, K]: number = (code - zero) * scale - low. ``codes``: int8 [rows, K], or uint8 [rows, K / 2] where
    they have four bits; ``scale`` f16 or f32 [rows, groups], ``low`` f32 [rows, groups] or None."""

    codes: Array
    scale: Array
    low: Array | None = None
    zero: int = 0


def _fields(raw: Array, *sizes: int) -> list[Array]:
    """The blocks' fields of these bytes: uint8 [rows, blocks, size] each."""
    blocks = np.ascontiguousarray(raw).reshape(len(raw), -1, sum(sizes))
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=-1)


def _halves(raw: Array) -> Array:
    """Little-endian f16 numbers, as they are."""
    return np.ascontiguousarray(raw).view(np.float16)


def _singles(raw: Array) -> Array:
    return _halves(raw).astype(np.float32)


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(len(array), -1)


def _paired(codes: Array) -> Array:
    """Codes of at most four bits [..., group], two a byte: the first half of each group, and the other half above it."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | codes[..., half:] << 4


def _nibbles(raw: Array) -> Array:
    """[..., bytes] as [..., 2, bytes]: low bits, then high bits."""
    return np.stack([raw & 15, raw >> 4], axis=-2)


def _fifth(codes: Array, high: Array) -> Array:
    """Codes of four bits [rows, blocks, 32] with a fifth from 32 bits."""
    bits = np.unpackbits(high, axis=-1, bitorder="little")
    return (codes | bits << 4).astype(np.int8)


@np.errstate(invalid="ignore")  # 0 times infinity is NaN, as in the reference
def _times(scale: Array, d: Array) -> Array:
    return _flat(scale * _singles(d))


def _q4_0(raw: Array) -> Codes:
    d, qs = _fields(raw, 2, 16)
    return Codes(_flat(qs), _flat(_halves(d)), zero=8)


def _q4_1(raw: Array) -> Codes:
    d, m, qs = _fields(raw, 2, 2, 16)
    return Codes(_flat(qs), _flat(_halves(d)), -_flat(_singles(m)))


def _q5_0(raw: Array) -> Codes:
    d, high, qs = _fields(raw, 2, 4, 16)
    codes = _fifth(_nibbles(qs).reshape(*qs.shape[:2], 32), high)
    return Codes(_flat(codes), _flat(_halves(d)), zero=16)


def _q5_1(raw: Array) -> Codes:
    d, m, high, qs = _fields(raw, 2, 2, 4, 16)
    codes = _fifth(_nibbles(qs).reshape(*qs.shape[:2], 32), high)
    return Codes(_flat(codes), _flat(_halves(d)), -_flat(_singles(m)))


def _q8_0(raw: Array) -> Codes:
    d, qs = _fields(raw, 2, 32)
    return Codes(_flat(qs.view(np.int8)), _flat(_halves(d)))


def _six_bits(scales: Array) -> tuple[Array, Array]:
    """The scales and the minima, six bits each, of the eight groups of a superblock of Q4_K or Q5_K."""
    first, second, third = scales[..., :4], scales[..., 4:8], scales[..., 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    low = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return scale.astype(np.float32), low.astype(np.float32)


def _q4_k(raw: Array) -> Codes:
    d, least, packed, qs = _fields(raw, 2, 2, 12, 128)
    scale, low = _six_bits(packed)
    # Of 64 codes the low bits are a group of 32 and the high bits the next one.
    codes = _nibbles(qs.reshape(*qs.shape[:2], 4, 32)).reshape(*qs.shape[:2], 8, 32)
    return Codes(_flat(_paired(codes)), _times(scale, d), _times(low, least))


def _q5_k(raw: Array) -> Codes:
    d, least, packed, high, qs = _fields(raw, 2, 2, 12, 32, 128)
    scale, low = _six_bits(packed)
    codes = _nibbles(qs.reshape(*qs.shape[:2], 4, 32)).reshape(*qs.shape[:2], 8, 32)
    fifth = high[:, :, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Codes(_flat((codes | fifth << 4).astype(np.int8)), _times(scale, d), _times(low, least))


def _q6_k(raw: Array) -> Codes:
    low_bits, high_bits, scales, d = _fields(raw, 128, 64, 16, 2)
    shape = low_bits.shape[:2]
    low = _nibbles(low_bits.reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = high_bits.reshape(*shape, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).astype(np.int8) - 32
    return Codes(_flat(codes), _times(scales.view(np.int8), d))


def _two_bits(raw: Array) -> Array:
    """64 bytes a superblock as 256 codes of two bits."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return raw.reshape(*raw.shape[:2], 2, 1, 32) >> shifts & 3


def _q2_k(raw: Array) -> Codes:
    scales, qs, d, least = _fields(raw, 16, 64, 2, 2)
    scale, low = (scales & 15).astype(np.float32), (scales >> 4).astype(np.float32)
    codes = _paired(_two_bits(qs).reshape(*qs.shape[:2], 16, 16))
    return Codes(_flat(codes), _times(scale, d), _times(low, least))


def _q3_k(raw: Array) -> Codes:
    high, qs, packed, d = _fields(raw, 32, 64, 12, 2)
    third = high[:, :, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _two_bits(qs).reshape(*qs.shape[:2], 8, 32) | third << 2
    low = _nibbles(packed[..., :8]).reshape(*packed.shape[:2], 16)
    top = packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scale = (low | top.reshape(low.shape) << 4).astype(np.float32) - 32
    codes = _paired(codes.reshape(*codes.shape[:2], 16, 16))
    return Codes(_flat(codes), _times(scale, d), zero=4)


DECODERS: Mapping[str, Callable[[Array], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
