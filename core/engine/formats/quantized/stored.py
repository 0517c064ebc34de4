"""Stored tensors as numbers: floats widened to f32, and codes out of 32-bit words."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.checkpoint import Tensor
from engine.formats.quantformats import Bytes, Floats
from engine.formats.quantized.blocks import in_turn

Ints = npt.NDArray[Any]

FLOATS = ("F16", "BF16", "F32")


def floats(tensor: Tensor, *index: slice) -> Floats:
    """Elements [index] of a tensor of one of FLOATS, as f32."""
    numbers = tensor.data.reshape(*tensor.shape, tensor.format.block_bytes)[index]
    return tensor.format.decode(np.ascontiguousarray(numbers).reshape(-1)).reshape(numbers.shape[:-1])


def words(tensor: Tensor) -> Ints:
    """An I32 tensor as unsigned: a view."""
    return tensor.data.view("<u4").reshape(tensor.shape)


def unpack(packed: Ints, bits: int) -> Bytes:
    """u32 [n, words] as codes of 4 or 8 bits, uint8 [n, words * 32 / bits]: the lowest bits first."""
    octets = np.ascontiguousarray(packed, "<u4").view(np.uint8)
    if bits == 8:
        return octets
    return in_turn(octets)
