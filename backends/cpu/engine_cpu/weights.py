"""Packing a weight for the native kernels: vectors as f32, matrices into panels of 16 columns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from engine.backend.v1 import Array, Call, Packed, WeightRef

from . import _native

DENSE = frozenset({"F32", "F16", "BF16", "FP8", "NF4", "FP4"})
"""Formats whose kernels read f32 activations; those of the others read activations of 8 bits."""
QUANTIZED = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"}
    | {"W4Z", "W8S", "W8M"}
)
FORMATS = DENSE | QUANTIZED
RANGE = 4096
"""Columns packed at a time: whole strips, so that threads never touch one strip together."""


def is_quantized(name: str) -> bool:
    return name in QUANTIZED


def takes_packed_activation(call: Call) -> bool:
    return any(is_quantized(ref.format) for name, ref in call.weights.items() if name.startswith("weight"))


def pack_plain(ref: WeightRef, progress: Callable[[int], None]) -> Packed:
    """A vector, or one an expert, as f32."""
    dense = np.ascontiguousarray(ref.dense(), np.float32)
    progress(dense.nbytes)
    return Packed(_native.plain(dense), dense.nbytes, lambda: dense)


def pack(ref: WeightRef, threads: int, progress: Callable[[int], None]) -> Packed:
    """A matrix [N, K] or [experts, N, K] becomes the panels of its format's family, packed by ``threads`` threads in ranges
    of columns."""
    *lead, columns, depth = ref.shape
    count = lead[0] if lead else 1
    weight = _native.alloc(ref.format, columns, depth, count)

    def pack_range(place: tuple[int, int]) -> int:
        index, first = place
        rows = ref.rows(index * columns + first, index * columns + min(first + RANGE, columns))
        _native.pack_into(weight, rows, first, index)
        return rows.nbytes

    places = [(index, first) for index in range(count) for first in range(0, columns, RANGE)]
    with ThreadPoolExecutor(threads) as pool:
        for done in pool.map(pack_range, places):
            progress(done)
    return Packed(weight, weight.nbytes, lambda: _unpack(weight, ref.shape))


def _unpack(weight: Any, shape: tuple[int, ...]) -> Array:
    matrices = [_native.unpack(weight, 0, weight.columns, index) for index in range(weight.count)]
    return np.stack(matrices).reshape(shape)
