"""Encoders of ggml's formats with two levels of scales: superblocks of 256 weights in parts of 16 or 32, each with a scale
(and an offset) of a few bits in units that the superblock keeps as f16.

Each takes weights f32 [elements of a part, parts, superblocks] and their importance of the same shape or None, and gives
uint8 [superblocks, bytes].
"""

from __future__ import annotations

import numpy as np

from engine.backend.v1 import Array
from engine.formats.quantformats import Floats
from engine.quantize import bits
from engine.quantize.blocks import Weight, grid
from engine.quantize.codebook import IQ4
from engine.quantize.search import Fit, fit_affine, fit_scale, levels


def q2_k(x: Floats, weight: Weight) -> Array:
    unit, low_unit, scales, offsets, level = _affine(x, weight, 3, grid(3, 0.6, 13), 15)
    return bits.blocks(scales | offsets << 4, _quarters(level), unit, low_unit)


def q4_k(x: Floats, weight: Weight) -> Array:
    unit, low_unit, scales, offsets, level = _affine(x, weight, 15, grid(15, 1.0, 13), 63)
    return bits.blocks(unit, low_unit, _six_bit_pairs(scales, offsets), _pairs(level))


def q5_k(x: Floats, weight: Weight) -> Array:
    unit, low_unit, scales, offsets, level = _affine(x, weight, 31, grid(31, 1.0, 11), 63)
    top = bits.fields((level >> 4).swapaxes(0, 1), 1)
    return bits.blocks(unit, low_unit, _six_bit_pairs(scales, offsets), top, _pairs(level & 15))


def q3_k(x: Floats, weight: Weight) -> Array:
    unit, scales, level = _symmetric(x, weight, 4, grid(-4, 0.9, 15), 32)
    order = level.swapaxes(0, 1).reshape(8, 32, -1)  # element 32 * part + byte
    low = (scales[:8] & 15) | (scales[8:] & 15) << 4
    high = bits.fields((scales >> 4).reshape(4, 4, -1), 2)
    return bits.blocks(bits.fields(order >> 2, 1), _quarters(level & 3), low, high, unit)


def q6_k(x: Floats, weight: Weight) -> Array:
    unit, scales, level = _symmetric(x, weight, 32, grid(-32, 1.0, 11), 128)
    order = level.swapaxes(0, 1).reshape(2, 4, 32, -1)  # element 128 * half + 32 * quarter + byte
    low = (order[:, :2] & 15) | (order[:, 2:] & 15) << 4
    high = bits.fields((order >> 4).swapaxes(0, 1), 2)
    signed = (scales - np.uint8(128)).reshape(16, -1)
    return bits.blocks(low.reshape(128, -1), high.reshape(64, -1), signed, unit)


def iq4_xs(x: Floats, weight: Weight) -> Array:
    elements, parts, count = x.shape
    flat, flat_weight = x.reshape(elements, -1), _flat(weight)
    unit, scale, scales = _unit(IQ4.fit(flat, flat_weight), parts, -32, 31)
    index = IQ4.indices(flat, scale.reshape(-1)).reshape(x.shape)
    packed = (index[:16] | index[16:] << 4).swapaxes(0, 1).reshape(128, count)
    low = (scales[0::2] & 15) | (scales[1::2] & 15) << 4
    high = bits.fields((scales >> 4).reshape(2, 4, -1).swapaxes(0, 1), 2)
    return bits.blocks(unit, high, low, packed)


def _symmetric(x: Floats, weight: Weight, reach: int, trials: Floats, unit_reach: int) -> tuple[Array, Array, Array]:
    """Levels -reach..reach - 1: the unit's bytes, the parts' scales in units (+ unit_reach) and the levels (+ reach), uint8."""
    elements, parts, count = x.shape
    flat = x.reshape(elements, -1)
    unit, scale, scales = _unit(
        fit_scale(flat, _flat(weight), -reach, reach - 1, trials), parts, -unit_reach, unit_reach - 1
    )
    level = levels(flat, scale.reshape(-1), -reach, reach - 1)
    return unit, scales, (level + np.float32(reach)).astype(np.uint8).reshape(x.shape)


def _unit(fit: Fit, parts: int, low: int, high: int) -> tuple[Array, Floats, Array]:
    """The scales of a superblock's parts in one unit: its bytes, the scales that result f32 [parts, superblocks], and these in
    units, uint8 with ``low`` as 0."""
    wanted, cost = fit.scale.reshape(parts, -1), fit.squares.reshape(parts, -1)
    trials = grid(low, 1.0, 9) if low < 0 else grid(high, 1.0, 9)
    stored, unit = bits.scales(fit_scale(wanted, cost, low, high, trials).scale)
    level = levels(wanted, unit, low, high)
    return stored, level * unit, (level - np.float32(low)).astype(np.uint8)


def _affine(x: Floats, weight: Weight, high: int, trials: Floats, top: int) -> tuple[Array, Array, Array, Array, Array]:
    """Levels 0..high: the bytes of the two units, scales and offsets in units 0..top, and the levels, all uint8.

    Once the scales are in units, each part's offset is fitted again to the levels that result.
    """
    elements, parts, count = x.shape
    flat, flat_weight = x.reshape(elements, -1), _flat(weight)
    fit = fit_affine(flat, flat_weight, high, trials, signed=False)
    stored, scale, scales = _unit(fit, parts, 0, top)
    flat_scale = scale.reshape(-1)
    level = levels(flat - fit.offset, flat_scale, 0, high)
    level *= flat_scale
    rest = flat - level
    if flat_weight is None:
        mass = np.full(rest.shape[1], elements, np.float32)
        offset = rest.sum(axis=0) / mass
    else:
        mass = flat_weight.sum(axis=0)
        offset = (rest * flat_weight).sum(axis=0) / mass
    below = Fit(np.maximum(-offset, 0), offset, mass)
    stored_low, low, offsets = _unit(below, parts, 0, top)
    np.add(flat, low.reshape(-1), out=rest)
    found = levels(rest, flat_scale, 0, high, out=level)
    return stored, stored_low, scales, offsets, found.astype(np.uint8).reshape(x.shape)


def _flat(weight: Weight) -> Weight:
    return None if weight is None else weight.reshape(len(weight), -1)


def _pairs(level: Array) -> Array:
    """4-bit levels [32, 8, blocks], parts in pairs: the first low and the second high, [128, blocks]."""
    order = level.swapaxes(0, 1)
    packed: Array = order[0::2] | order[1::2] << 4
    return packed.reshape(128, -1)


def _quarters(level: Array) -> Array:
    """2-bit levels of parts of 16, element 128 * half + 32 * quarter + byte: [64, blocks]."""
    order = level.swapaxes(0, 1).reshape(2, 4, 32, -1)
    return bits.fields(order.swapaxes(0, 1), 2).reshape(64, -1)


def _six_bit_pairs(scales: Array, offsets: Array) -> Array:
    """Eight scales and eight offsets of 6 bits in 12 bytes: the upper halves' high bits lie above the lower halves."""
    return np.concatenate(
        [
            scales[:4] | scales[4:] >> 4 << 6,
            offsets[:4] | offsets[4:] >> 4 << 6,
            (scales[4:] & 15) | (offsets[4:] & 15) << 4,
        ]
    )
