"""Philox4x32-10 (Salmon et al., SC 2011) on u32 arrays, and the noise that is made of it."""

from __future__ import annotations

import mlx.core as mx

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def gumbel(seeds: mx.array, positions: mx.array, branches: mx.array, vocabulary: int) -> mx.array:
    """The noise -log(-log u) of rows with seeds u32 [R, 2], positions i32 [R] and branches u32 [R]: f32 [R, vocabulary].
    The word of a token is lane token % 4 of the counter (token / 4, position, branch, 0)."""
    count, lanes = len(positions), -(-vocabulary // 4)
    shape = (count, lanes)
    c0 = mx.broadcast_to(mx.arange(lanes, dtype=mx.uint32), shape)
    c1 = mx.broadcast_to(positions.astype(mx.uint32)[:, None], shape)
    c2 = mx.broadcast_to(branches[:, None], shape)
    words = mx.stack(_philox((c0, c1, c2, mx.zeros_like(c0)), seeds), axis=-1)
    return _noise(words.reshape(count, -1)[:, :vocabulary])


def _philox(counter: tuple[mx.array, ...], key: mx.array) -> list[mx.array]:
    c0, c1, c2, c3 = counter
    for step in range(ROUNDS):
        # The key grows by a constant a round, modulo 2^32.
        k0, k1 = (key[:, n : n + 1] + mx.array(step * KEY_INCREMENTS[n] & 0xFFFFFFFF, mx.uint32) for n in (0, 1))
        (high0, low0), (high1, low1) = _multiply(c0, MULTIPLIERS[0]), _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


def _multiply(word: mx.array, multiplier: int) -> tuple[mx.array, mx.array]:
    product = word.astype(mx.uint64) * mx.array(multiplier, mx.uint64)
    return (product >> 32).astype(mx.uint32), product.astype(mx.uint32)


def _noise(words: mx.array) -> mx.array:
    """u = (2 (word >> 8) + 1) / 2^25 needs 25 bits where it is above a half; there 1 - u is an f32 number."""
    odd = (words >> 8) * 2 + 1
    upper = odd >= 1 << 24
    near = mx.where(upper, (1 << 25) - odd, odd).astype(mx.float32) * 2.0**-25
    return -mx.log(-mx.where(upper, mx.log1p(-near), mx.log(near)))
