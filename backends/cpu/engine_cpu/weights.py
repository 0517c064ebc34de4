"""Packing a weight for the native kernels: vectors as they are, matrices into panels of 16 columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.backend.v1 import Array, Call, Packed, WeightRef

from . import _native

DENSE = frozenset({"F32", "F16", "BF16"})
QUANTIZED = frozenset({"Q4_0", "Q8_0", "Q4_K", "Q6_K"})
FORMATS = DENSE | QUANTIZED


def is_quantized(name: str) -> bool:
    return name in QUANTIZED


def takes_packed_activation(call: Call) -> bool:
    return any(is_quantized(ref.format) for name, ref in call.weights.items() if name.startswith("weight"))


def pack(ref: WeightRef, isa: str, progress: Callable[[int], None]) -> Packed:
    """A vector becomes plain f32; a matrix [N, K] or [experts, N, K] the panels of its format's family."""
    if len(ref.shape) == 1:
        dense = np.ascontiguousarray(ref.dense(), np.float32)
        progress(dense.nbytes)
        return Packed(_native.plain(dense), dense.nbytes, lambda: dense)
    *count, columns, depth = ref.shape
    rows = ref.rows()
    handle = _native.pack(ref.format, rows, depth, count[0] if count else 1, isa)
    progress(rows.nbytes)
    return Packed(handle, handle.nbytes, lambda: _unpack(handle, ref.shape, isa))


def _unpack(handle: Any, shape: tuple[int, ...], isa: str) -> Array:
    dense: Array = _native.unpack(handle, isa)
    return dense.reshape(shape)
