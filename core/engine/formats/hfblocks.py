"""Blocks of quantized weights whose codes and scales lie in tensors of their own: those of Hugging Face checkpoints, and NVFP4.

A row of K weights is K / 32 blocks (K / 64 for those of four bits with f32 scales), little-endian:

    W4Z      f16 scale; u8 zero; u8 qs[16]: k = j in the low nibble of byte j, j + 16 in the high.  scale * (q - zero)
    W8S      f32 scale; i8 q[32].                                                                   scale * q
    W8M      f32 scale, minimum; u8 q[32].                                                          scale * q - minimum
    FP8      f32 scale; 32 numbers of F8_E4M3.                                                      scale * number
    NF4 FP4  f32 scale; u8 qs[32]: k = 2j in the high nibble of byte j, 2j + 1 in the low.          scale * table[q]
    NVFP4S   f32 scale; u8 scales[4], E4M3 without their sign; u8 qs[32]: of each 16 weights eight
             bytes, k = j in the low nibble, j + 8 in the high, of E2M1.       scale * scales[k / 16] * number

The f32 scales of W8S and W8M have at most 22 significant bits, so that scale * q has at most 30.
NVFP4S is ggml's block of NVFP4 behind the scale of the whole weight (in experts, of each).
NF4's numbers are quantiles of the normal distribution (QLoRA, arXiv 2305.14314, appendix E); FP4's are those of
bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.fp8 import E4M3_TABLE

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

NF4_TABLE: Floats = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_FP4_MAGNITUDES = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
FP4_TABLE: Floats = np.concatenate([_FP4_MAGNITUDES, -_FP4_MAGNITUDES])
_E8M0_TABLE: Floats = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
_E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_TABLE: Floats = np.concatenate([_E2M1_MAGNITUDES, 0 - _E2M1_MAGNITUDES])  # one zero, as ggml has it
# ggml leaves the sign out, and takes one of the two codes of NaN for 0, the other for what it would be.
_SCALE_TABLE: Floats = np.tile(np.concatenate([E4M3_TABLE[:127], [np.float32(480)]]), 2)
_SCALE_TABLE[127] = 0


def _split(raw: Bytes, block_bytes: int, *widths: int) -> list[Any]:
    """A row's blocks [..., blocks, block_bytes] cut into contiguous parts of these widths."""
    blocks = raw.reshape(*raw.shape[:-1], -1, block_bytes)
    ends = np.cumsum([0, *widths])
    return [np.ascontiguousarray(blocks[..., ends[i] : ends[i + 1]]) for i in range(len(widths))]


def _row(values: Floats) -> Floats:
    return values.reshape(*values.shape[:-2], -1)


def decode_e4m3(raw: Bytes) -> Floats:
    """Numbers without a scale."""
    return E4M3_TABLE[raw]


def decode_e8m0(raw: Bytes) -> Floats:
    """Powers of two, and NaN (OCP Microscaling Formats 1.0)."""
    return _E8M0_TABLE[raw]


def decode_w4z(raw: Bytes) -> Floats:
    scale, zero, qs = _split(raw, 19, 2, 1, 16)
    q = np.concatenate([qs & 15, qs >> 4], axis=-1).astype(np.float32)
    return _row(scale.view("<f2").astype(np.float32) * (q - zero))


def decode_w8s(raw: Bytes) -> Floats:
    scale, q = _split(raw, 36, 4, 32)
    return _row(scale.view("<f4") * q.view(np.int8).astype(np.float32))


def decode_w8m(raw: Bytes) -> Floats:
    scale, minimum, q = _split(raw, 40, 4, 4, 32)
    return _row(scale.view("<f4") * q.astype(np.float32) - minimum.view("<f4"))


def decode_fp8(raw: Bytes) -> Floats:
    scale, numbers = _split(raw, 36, 4, 32)
    return _row(scale.view("<f4") * E4M3_TABLE[numbers])


def _decode_table(raw: Bytes, table: Floats) -> Floats:
    scale, qs = _split(raw, 36, 4, 32)
    q = np.stack([qs >> 4, qs & 15], axis=-1).reshape(*qs.shape[:-1], 64)
    return _row(scale.view("<f4") * table[q])


def decode_nf4(raw: Bytes) -> Floats:
    return _decode_table(raw, NF4_TABLE)


def decode_fp4(raw: Bytes) -> Floats:
    return _decode_table(raw, FP4_TABLE)


def decode_nvfp4s(raw: Bytes) -> Floats:
    scale, scales, qs = _split(raw, 40, 4, 4, 32)
    q = qs.reshape(*qs.shape[:-1], 4, 8)
    numbers = _E2M1_TABLE[np.concatenate([q & 15, q >> 4], axis=-1)]
    each = scale.view("<f4") * _SCALE_TABLE[scales]
    return _row((each[..., None] * numbers).reshape(*qs.shape[:-1], 64))
