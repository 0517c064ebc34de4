"""Orders that do not depend on how MLX sorts: by value, and by index where values are equal."""

from __future__ import annotations

import mlx.core as mx


def descending_keys(values: mx.array) -> mx.array:
    """u64 keys whose ascending order is that of the numbers from the greatest on, lowest index of the last axis first on
    ties; all are different. No NaN may be among them."""
    # Sorting is not promised to be stable, so the index is a part of what is sorted. -0 counts as 0.
    bits = mx.where(values == 0, mx.array(0, mx.uint32), values.astype(mx.float32).view(mx.uint32))
    words = mx.where(bits >> 31, bits, bits ^ mx.array(0x7FFFFFFF, mx.uint32)).astype(mx.uint64)
    return words << 32 | mx.arange(values.shape[-1], dtype=mx.uint32).astype(mx.uint64)


def index_of(keys: mx.array) -> mx.array:
    """The indices that the keys were made with, u32."""
    return (keys & 0xFFFFFFFF).astype(mx.uint32)


def best_first(values: mx.array) -> mx.array:
    """Indices of the last axis by descending value, lowest index first on ties: u32."""
    return index_of(mx.sort(descending_keys(values), axis=-1))
