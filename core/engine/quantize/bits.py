"""Packing levels into the bytes of ggml's blocks (layouts: ggml-org/ggml, src/ggml-common.h). Blocks are columns: levels are
uint8 [elements, blocks], packed bytes uint8 [bytes, blocks]."""

from __future__ import annotations

import numpy as np

from engine.backend.v1 import Array
from engine.errors import FormatError
from engine.formats.quantformats import Floats


def halves(values: Floats) -> tuple[Array, Floats]:
    """f32 [blocks] as f16: the bytes [2, blocks], and the values that they hold. FormatError where f16 is too small."""
    with np.errstate(over="ignore"):
        stored = values.astype("<f2")
    if not np.isfinite(stored).all():
        raise FormatError("a block's scale is beyond what f16 holds (65504); use a type without blocks, such as BF16.")
    raw: Array = stored.view(np.uint8).reshape(-1, 2).T
    return raw, stored.astype(np.float32)


def scales(values: Floats) -> tuple[Array, Floats]:
    """As ``halves``, for scales of levels: below f16's normal numbers, where it has steps of 2^-24, rounded away from zero. A
    scale half a step too small would clip the largest weights."""
    step = np.float32(2.0**-24)
    outward = np.copysign(np.ceil(np.abs(values) / step) * step, values)
    return halves(np.where(np.abs(values) < np.float32(2.0**-14), outward, values))


def nibbles(levels: Array) -> Array:
    """Levels below 16 [32, blocks], the first half low and the second high: [16, blocks]."""
    packed: Array = levels[:16] | levels[16:] << 4
    return packed


def fields(levels: Array, width: int) -> Array:
    """Levels [parts, elements, blocks] below 2^width, part p at bit p * width: [elements, blocks]."""
    packed: Array = levels[0].copy()
    for part in range(1, len(levels)):
        packed |= levels[part] << np.uint8(part * width)
    return packed


def high_bits(levels: Array, bit: int) -> Array:
    """One bit of each of 32 levels [32, blocks], element e at bit e of a little-endian u32: [4, blocks]."""
    return fields((levels >> np.uint8(bit) & 1).reshape(4, 8, -1).swapaxes(0, 1), 1)


def blocks(*parts: Array) -> Array:
    """The parts of a block [bytes, blocks], one after the other: uint8 [blocks, bytes]."""
    return np.ascontiguousarray(np.concatenate(parts).T)
