"""Layers whose memory does not grow with the tokens: a short convolution, attention by the gated delta rule, and the scan of
Mamba-2's state-space layers.

Sequences of padding have the null block, which anything may be written to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from engine.backend.v1 import Call

from .given import EXACT, Function, Given, Op, Site

_NORM_EPS = 1e-6
"""Added to the squared length of a query or key before its root is taken."""


@dataclass(frozen=True)
class Place:
    """Of each token of a step [T]: its sequence, its number among those of the sequence and its position there, and whether what
    is remembered after it is left in its block."""

    offsets: jax.Array
    table: jax.Array
    size: int
    seq: jax.Array
    number: jax.Array
    position: jax.Array
    left: jax.Array

    @staticmethod
    def of(given: Given, tokens: int, size: int) -> Place:
        offsets, starts = given.inputs["query_offsets"], given.inputs["seq_starts"]
        token = jnp.arange(tokens)
        seq = jnp.minimum(jnp.searchsorted(offsets[1:], token, side="right"), len(starts) - 1)
        number = token - offsets[seq]
        position = starts[seq] + number
        left = (token + 1 == offsets[seq + 1]) | ((position + 1) % size == 0)
        return Place(offsets, given.inputs["page_table"], size, seq, number, position, left)

    def block(self, seq: jax.Array, position: jax.Array) -> jax.Array:
        """The block of a position, or of the first one where that is negative."""
        return self.table[seq, jnp.maximum(position, 0) // self.size]

    def before(self, state: jax.Array, starts: jax.Array) -> jax.Array:
        """What each sequence remembers of the tokens before the step's [S, ...]."""
        found = state[self.block(jnp.arange(len(starts)), starts - 1)]
        return jnp.where(starts.reshape(-1, *[1] * (found.ndim - 1)) > 0, found, 0)


def _causal_conv(call: Call, site: Site) -> Function:
    size, silu = call.attr("block_size"), call.attr("act") == "silu"

    def run(given: Given) -> tuple[jax.Array, ...]:
        x, taps, tail = given.wide("x"), given.vector("weight").T, given.states["tail"]
        tokens, width, starts = len(x), len(taps), given.inputs["seq_starts"]
        place = Place.of(given, tokens, size)
        before = place.before(tail, starts)

        def row(token: jax.Array, back: int) -> jax.Array:
            """The rows so many tokens before those of the step that are given."""
            number = place.number[token] - back
            old = before[place.seq[token], jnp.clip(width - 1 + number, 0, width - 2)]
            return jnp.where((number < 0)[:, None], old, x[jnp.maximum(token - back, 0)])

        token, bias = jnp.arange(tokens), given.optional("bias")
        total = sum((row(token, width - 1 - n) * taps[n] for n in range(width)), start=jnp.zeros(()))
        total = total if bias is None else total + bias
        # At most so many tokens end a block or their sequence's step; what is there besides is dropped.
        ends = jnp.nonzero(place.left, size=min(tokens, tokens // size + 2 * len(starts)), fill_value=tokens)[0]
        last = jnp.minimum(ends, tokens - 1)
        blocks = jnp.where(ends < tokens, place.block(place.seq[last], place.position[last]), len(tail))
        kept = jnp.stack([row(last, width - 2 - n) for n in range(width - 1)], axis=1)
        given.states["tail"] = tail.at[blocks].set(kept, mode="drop")
        return (total / (1 + jnp.exp(-total)) if silu else total,)

    return run


def _gated_delta(call: Call, site: Site) -> Function:
    def token(
        state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, kept: jax.Array, written: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        state = state * kept[:, None, None]
        change = written[:, None] * (v - jnp.einsum("hk,hkv->hv", k, state, precision=EXACT))
        state = state + k[:, :, None] * change[:, None]
        return jnp.einsum("hk,hkv->hv", q, state, precision=EXACT), state

    def run(given: Given) -> tuple[jax.Array, ...]:
        return (_token_by_token(given, call.attr("block_size"), token, _operands(call, given)),)

    return run


def _ssm_scan(call: Call, site: Site) -> Function:
    heads, groups, state_dim, head_dim = (call.attr(name) for name in ("heads", "groups", "state_dim", "head_dim"))
    columns = heads * head_dim

    def token(
        state: jax.Array, b: jax.Array, c: jax.Array, kept: jax.Array, written: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        b, c = (part.repeat(heads // groups, axis=0) for part in (b, c))
        state = state * kept[:, None, None] + b[:, :, None] * written[:, None]
        return jnp.einsum("hn,hnp->hp", c, state, precision=EXACT), state

    def run(given: Given) -> tuple[jax.Array, ...]:
        xbc = given.wide("xbc")
        x = xbc[:, :columns].reshape(-1, heads, head_dim)
        bc = xbc[:, columns:].reshape(-1, 2, groups, state_dim)
        step = jax.nn.softplus(given.wide("dt") + given.vector("bias"))
        operands = bc[:, 0], bc[:, 1], jnp.exp(given.vector("rate") * step), step[..., None] * x
        read = _token_by_token(given, call.attr("block_size"), token, operands)
        return (read + (given.vector("skip")[:, None] * x).reshape(-1, columns),)

    return run


Token = Callable[..., tuple[jax.Array, jax.Array]]
"""What a token's heads read, and the memory after it, from the memory before it [heads, ...] and the token's operands."""


def _token_by_token(given: Given, size: int, token: Token, operands: Sequence[jax.Array]) -> jax.Array:
    """What all tokens read [T, columns], of operands [T, ...]. The first token of each sequence at once, and then the others one
    after the other, whose memory lies in their blocks meanwhile: a block's last token writes to it last."""
    starts, memory = given.inputs["seq_starts"], given.states["memory"]
    tokens, sequences = len(operands[0]), jnp.arange(len(starts))
    place = Place.of(given, tokens, size)
    first = place.offsets[:-1]
    some = first < place.offsets[1:]
    read, states = jax.vmap(token)(
        place.before(memory, starts), *(part[jnp.where(some, first, 0)] for part in operands)
    )
    y = jnp.zeros((tokens, *read.shape[1:])).at[jnp.where(some, first, tokens)].set(read, mode="drop")
    blocks = jnp.where(some, place.block(sequences, starts), len(memory))
    memory = memory.at[blocks].set(states, mode="drop")
    later = jnp.nonzero(place.number > 0, size=tokens, fill_value=0)[0]

    def one(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, memory = carry
        at = later[n]
        seq, position = place.seq[at], place.position[at]
        read, state = token(memory[place.block(seq, position - 1)], *(part[at] for part in operands))
        return y.at[at].set(read), memory.at[place.block(seq, position)].set(state)

    y, given.states["memory"] = jax.lax.fori_loop(0, (place.number > 0).sum(), one, (y, memory))
    return y.reshape(tokens, -1)


def _operands(call: Call, given: Given) -> tuple[jax.Array, ...]:
    """Queries, keys and values [T, value_heads, ...], and what of its memory each head keeps and writes [T, value_heads]."""
    qkv, key_heads, key_dim = given.wide("qkv"), call.attr("key_heads"), call.attr("key_dim")
    keys, heads = key_heads * key_dim, call.attr("value_heads")
    units = qkv[:, : 2 * keys].reshape(-1, 2, key_heads, key_dim)
    units = units * jax.lax.rsqrt((units * units).sum(axis=-1, keepdims=True) + _NORM_EPS)
    units = units.repeat(heads // key_heads, axis=2)
    values = qkv[:, 2 * keys :].reshape(-1, heads, call.attr("value_dim"))
    kept = jnp.exp(given.vector("rate") * jax.nn.softplus(given.wide("decay") + given.vector("bias")))
    return units[:, 0] * key_dim**-0.5, units[:, 1], values, kept, 1 / (1 + jnp.exp(-given.wide("beta")))


OPS: Mapping[str, Op] = {
    "causal_conv": Op(frozenset({"act", "bias"}), _causal_conv, writes=True),
    "gated_delta": Op(make=_gated_delta, writes=True),
    "ssm_scan": Op(make=_ssm_scan, writes=True),
}
