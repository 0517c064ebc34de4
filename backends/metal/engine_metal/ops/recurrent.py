"""Layers whose memory does not grow with the tokens: causal_conv, gated_delta and ssm_scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..operands import Operands

NORM_EPS = 1e-6
"""Added to the squared length of a query or key before its root is taken."""


@dataclass(frozen=True)
class Stretch:
    """Sequences from number ``first`` on, with ``length`` tokens each; those of more than one token come one by one. Their rows
    lie from ``row`` on. ``left``: the tokens after which what is remembered is left."""

    first: int
    count: int
    row: int
    length: int
    left: frozenset[int] = frozenset((0,))

    def rows(self, x: mx.array) -> mx.array:
        """x [T, ...] as [count, length, ...]."""
        return x[self.row : self.row + self.count * self.length].reshape(self.count, self.length, *x.shape[1:])

    def block(self, o: Operands, token: int) -> mx.array:
        """The block of each sequence's token, the step's first being number 0; of -1 the one before it, if there is one."""
        seqs = slice(self.first, self.first + self.count)
        at = mx.maximum(o["seq_starts"][seqs] + token, 0) // o.attr("block_size")
        return mx.take_along_axis(o["page_table"][seqs], at[:, None], axis=1)[:, 0]

    def before(self, o: Operands, state: mx.array) -> mx.array:
        """What each sequence remembers of the tokens before the step's: [count, ...]."""
        found = state[self.block(o, -1)]
        begun = o["seq_starts"][self.first : self.first + self.count] > 0
        return mx.where(begun.reshape(-1, *[1] * (found.ndim - 1)), found, 0)


def begun(o: Operands, state: str) -> list[tuple[Stretch, mx.array]]:
    """A step's sequences, with what they remember. That is evaluated here: a state that is still to be read is copied when it
    is written to."""
    found = [(some, some.before(o, o.state(state))) for some in _stretches(o)]
    mx.eval([before for _, before in found])
    return found


def _stretches(o: Operands) -> Iterator[Stretch]:
    """All of a step's sequences, where each has one token; else the leading ones that have one, and the others."""
    if o.dims.T == o.dims.S:
        yield Stretch(0, o.dims.S, 0, 1)
        return
    offsets, starts, size = o.on_host("query_offsets").tolist(), o.on_host("seq_starts").tolist(), o.attr("block_size")
    singles = 0
    while offsets[singles + 1] == singles + 1:
        singles += 1
    if singles:
        yield Stretch(0, singles, 0, 1)
    for seq in range(singles, o.dims.S):
        length = offsets[seq + 1] - offsets[seq]
        ends = range(size - 1 - starts[seq] % size, length, size)
        yield Stretch(seq, 1, offsets[seq], length, frozenset((*ends, length - 1)))


def causal_conv(o: Operands) -> tuple[mx.array, ...]:
    x, taps, tail = o.wide("x"), o.vector("weight").T, o.state("tail")
    parts, width = [], len(taps)
    for some, before in begun(o, "tail"):
        rows = mx.concatenate([before, some.rows(x)], axis=1)
        total = rows[:, : some.length] * taps[0]
        for n in range(1, width):
            total = total + rows[:, n : n + some.length] * taps[n]
        if o.has("bias"):
            total = total + o.vector("bias")
        for n in sorted(some.left):
            tail[some.block(o, n)] = rows[:, n + 1 : n + width]
        y = total * mx.sigmoid(total) if o.attr("act") == "silu" else total
        parts.append(y.reshape(-1, x.shape[1]))
    o.put_state("tail", tail)
    return (mx.concatenate(parts),)


def gated_delta(o: Operands) -> tuple[mx.array, ...]:
    def token(state: mx.array, q: mx.array, k: mx.array, v: mx.array, kept: mx.array, written: mx.array) -> Token:
        state = state * kept[..., None, None]
        change = written[..., None, None] * (v[:, :, None] - k[:, :, None] @ state)
        state = state + k[..., None] * change
        return q[:, :, None] @ state, state

    return (_token_by_token(o, token, _operands(o)),)


def ssm_scan(o: Operands) -> tuple[mx.array, ...]:
    heads, groups, state_dim, head_dim = (o.attr(name) for name in ("heads", "groups", "state_dim", "head_dim"))
    xbc, columns = o.wide("xbc"), heads * head_dim
    x = xbc[:, :columns].reshape(-1, heads, head_dim)
    bc = xbc[:, columns:].reshape(-1, 2, groups, 1, state_dim)
    step = _softplus(o.wide("dt") + o.vector("bias"))
    written = (step[..., None] * x).reshape(-1, groups, heads // groups, head_dim)

    def token(state: mx.array, b: mx.array, c: mx.array, kept: mx.array, written: mx.array) -> Token:
        state = (state * kept[..., None, None]).reshape(-1, groups, heads // groups, state_dim, head_dim)
        state = state + b[..., None] * written[..., None, :]
        return c[..., None, :] @ state, state.reshape(-1, heads, state_dim, head_dim)

    read = _token_by_token(o, token, (bc[:, 0], bc[:, 1], mx.exp(o.vector("rate") * step), written))
    return (read + (o.vector("skip")[:, None] * x).reshape(-1, columns),)


Token = tuple[mx.array, mx.array]
"""What the heads of some sequences read at a token each, and what they remember after it."""


def _token_by_token(o: Operands, token: Callable[..., Token], operands: Sequence[mx.array]) -> mx.array:
    """What is read [T, ...] of the memory, from operands [T, ...]. Token by token, so that it makes no difference how a prompt
    is cut into steps."""
    memory, parts = o.state("memory"), []
    for some, before in begun(o, "memory"):
        own, state = [some.rows(part) for part in operands], before
        for n in range(some.length):
            read, state = token(state, *(part[:, n] for part in own))
            parts.append(read.reshape(some.count, -1))
            if n in some.left:
                memory[some.block(o, n)] = state
    o.put_state("memory", memory)
    return mx.concatenate(parts)


def _operands(o: Operands) -> tuple[mx.array, ...]:
    """Queries, keys and values [T, value_heads, ...], and what of its memory each head keeps and writes [T, value_heads]."""
    qkv, key_heads, key_dim, heads = o.wide("qkv"), o.attr("key_heads"), o.attr("key_dim"), o.attr("value_heads")
    keys = key_heads * key_dim
    units = qkv[:, : 2 * keys].reshape(-1, 2, key_heads, key_dim)
    units = units * mx.rsqrt((units * units).sum(axis=-1, keepdims=True) + NORM_EPS)
    units = mx.repeat(units, heads // key_heads, axis=2)
    values = qkv[:, 2 * keys :].reshape(-1, heads, o.attr("value_dim"))
    kept = mx.exp(o.vector("rate") * _softplus(o.wide("decay") + o.vector("bias")))
    return units[:, 0] * key_dim**-0.5, units[:, 1], values, kept, mx.sigmoid(o.wide("beta"))


def _softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, mx.array(0.0))
