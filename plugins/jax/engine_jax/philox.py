"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw (SC 2011), in 32-bit arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def _multiplied(word: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """The high and the low word of a product of 32-bit words, from products of halves."""
    low, high = word & 0xFFFF, word >> 16
    by_low, by_high = jnp.uint32(by & 0xFFFF), jnp.uint32(by >> 16)
    middle = high * by_low + (low * by_low >> 16)
    other = low * by_high + (middle & 0xFFFF)
    return high * by_high + (middle >> 16) + (other >> 16), word * jnp.uint32(by)


def words(counter: tuple[jax.Array, ...], key: jax.Array) -> tuple[jax.Array, ...]:
    """Four random words of each counter of four u32 arrays, with keys u32 [..., 2]."""
    c0, c1, c2, c3 = counter
    for step in range(_ROUNDS):
        k0, k1 = (key[..., n] + jnp.uint32(step * more & 0xFFFFFFFF) for n, more in enumerate(_INCREMENTS))
        high0, low0 = _multiplied(c0, _MULTIPLIERS[0])
        high1, low1 = _multiplied(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def gumbel(seeds: jax.Array, positions: jax.Array, branches: jax.Array, vocabulary: int) -> jax.Array:
    """The noise -log(-log u) of every token of each row, f32 [rows, vocabulary]: u = (word + 1/2) / 2^24 of the upper 24
    bits. Near 1 its logarithm is taken of 1 - u, which f32 holds exactly where it does not hold u."""
    tokens = jnp.arange(-(-vocabulary // 4), dtype=jnp.uint32)[None]
    rows = [jnp.asarray(part, jnp.uint32)[:, None] for part in (positions, branches)]
    counter = jnp.broadcast_arrays(tokens, *rows, jnp.zeros_like(rows[0]))
    lanes = jnp.stack(words(tuple(counter), seeds[:, None, :]), axis=-1)
    upper = (lanes.reshape(len(seeds), -1)[:, :vocabulary] >> 8).astype(jnp.float32)
    below = jnp.log((upper + 0.5) * 2.0**-24)
    above = jnp.log1p(-((2.0**24 - upper) - 0.5) * 2.0**-24)
    return -jnp.log(-jnp.where(upper < 2.0**23, below, above))
