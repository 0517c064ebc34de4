"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011)."""

from __future__ import annotations

import numpy as np

from ..backend.v1 import Array

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Array, key: Array) -> Array:
    """Random words u32 [..., 4] of counters u32 [..., 4] and keys u32 [..., 2], whose leading axes broadcast."""
    c0, c1, c2, c3 = (np.asarray(counter[..., lane], np.uint32) for lane in range(4))
    key0, key1 = (np.asarray(key[..., word], np.uint64) for word in range(2))
    for step in range(ROUNDS):
        # The key grows by a constant a round, modulo 2^32.
        k0 = (key0 + np.uint64(step * KEY_INCREMENTS[0] & 0xFFFFFFFF)).astype(np.uint32)
        k1 = (key1 + np.uint64(step * KEY_INCREMENTS[1] & 0xFFFFFFFF)).astype(np.uint32)
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


def uniform(words: Array) -> Array:
    """f64 in (0, 1), exactly (word >> 8) * 2^-24 + 2^-25. These need 25 bits: f32 would round the greatest to 1."""
    return (np.asarray(words, np.uint32) >> 8) * 2.0**-24 + 2.0**-25


def _multiply(word: Array, multiplier: np.uint64) -> tuple[Array, Array]:
    product = word.astype(np.uint64) * multiplier
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)
