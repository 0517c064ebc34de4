"""Encoders of ggml's formats with one level of scales: blocks of 32 weights.

Each takes weights f32 [32, blocks] and their importance of the same shape or None, and gives uint8 [blocks, bytes].
"""

from __future__ import annotations

import numpy as np

from engine.backend.v1 import Array
from engine.formats.quantformats import Floats
from engine.quantize import bits
from engine.quantize.codebook import IQ4, MX
from engine.quantize.search import fit_affine, fit_scale, levels

Weight = Floats | None


def grid(middle: float, reach: float, count: int) -> Floats:
    """Trial levels from ``middle`` to ``reach`` on both sides."""
    return np.linspace(middle - reach, middle + reach, count, dtype=np.float32)


def q4_0(x: Floats, weight: Weight) -> Array:
    stored, scale = bits.scales(fit_scale(x, weight, -8, 7, grid(-8, 1.2, 17)).scale)
    return bits.blocks(stored, bits.nibbles(_unsigned(levels(x, scale, -8, 7), 8)))


def q5_0(x: Floats, weight: Weight) -> Array:
    stored, scale = bits.scales(fit_scale(x, weight, -16, 15, grid(-16, 1.2, 17)).scale)
    level = _unsigned(levels(x, scale, -16, 15), 16)
    return bits.blocks(stored, bits.high_bits(level, 4), bits.nibbles(level & 15))


def q8_0(x: Floats, weight: Weight) -> Array:
    """The largest weight is level 127: at 8 bits a search finds nothing better worth its time."""
    stored, scale = bits.scales(np.abs(x).max(axis=0) / np.float32(127))
    return bits.blocks(stored, levels(x, scale, -127, 127).astype(np.int8).view(np.uint8))


def q4_1(x: Floats, weight: Weight) -> Array:
    scale, offset, level = _affine(x, weight, 15)
    return bits.blocks(scale, offset, bits.nibbles(level))


def q5_1(x: Floats, weight: Weight) -> Array:
    scale, offset, level = _affine(x, weight, 31)
    return bits.blocks(scale, offset, bits.high_bits(level, 4), bits.nibbles(level & 15))


def iq4_nl(x: Floats, weight: Weight) -> Array:
    stored, scale = bits.scales(IQ4.fit(x, weight).scale)
    return bits.blocks(stored, bits.nibbles(IQ4.indices(x, scale)))


def mxfp4(x: Floats, weight: Weight) -> Array:
    """A power of two for a scale: the one that puts the largest weight at the top of the codebook, or one of its neighbours
    (Open Compute Project, Microscaling Formats 1.0, section 5.3)."""
    largest = np.abs(x).max(axis=0)
    exponent = np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2
    best, chosen = np.full(x.shape[1], np.inf, np.float32), exponent
    for step in (-1, 0, 1):
        error = MX.error(x, weight, _power(exponent + step))
        chosen = np.where(error < best, exponent + step, chosen)
        best = np.minimum(best, error)
    chosen = np.clip(chosen, _LEAST, 127)
    return bits.blocks((chosen + 127).astype(np.uint8)[None], bits.nibbles(MX.indices(x, _power(chosen))))


_LEAST = -125  # twice the inverse of the half of a smaller power is beyond f32


def _power(exponent: Floats) -> Floats:
    """The codebook's numbers are doubled, so the scale is half of the power."""
    return np.ldexp(np.float32(0.5), np.clip(exponent, _LEAST, 127).astype(np.int32))


def _unsigned(level: Floats, bias: int) -> Array:
    return (level + np.float32(bias)).astype(np.uint8)


def _affine(x: Floats, weight: Weight, high: int) -> tuple[Array, Array, Array]:
    """The bytes of scale and offset, and the levels."""
    fit = fit_affine(x, weight, high, grid(high, 1.0, 13), signed=True)
    stored_scale, scale = bits.scales(fit.scale)
    stored_offset, offset = bits.halves(fit.offset)
    return stored_scale, stored_offset, levels(x - offset, scale, 0, high).astype(np.uint8)
