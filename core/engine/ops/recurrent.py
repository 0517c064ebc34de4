"""Layers whose memory does not grow with the tokens: a short convolution, attention by the gated delta rule, and the scan of
Mamba-2's state-space layers.

Their states have a cache group's blocks as the first axis. A block holds what is remembered after its last token, or, while it
fills, after the last one so far: a sequence goes on from the block of the token before its first, and leaves its memory in the
block of each block's last token and of its own last. So full blocks are shared prefixes as those of a KV cache are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..backend.v1 import Array, Dims
from ..errors import OpError
from .cases import Batch, random_batch
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance

NORM_EPS = 1e-6
"""Added to the squared length of a query or key before its root is taken."""


def causal_conv(
    *,
    x: Array,
    seq_starts: Array,
    query_offsets: Array,
    page_table: Array,
    weight: Array,
    tail: Array,
    block_size: int,
    bias: Array | None = None,
    act: str = "silu",
) -> tuple[Array]:
    """A causal convolution along each sequence, a filter a column, and what ``act`` (silu, or identity) makes of it: x [T, C],
    weight [C, W], bias [C] -> f32 [T, C]. OpError for another act.

    y[t, c] = act(bias[c] + sum of weight[c, w] * x[t - W + 1 + w, c]), with zeros before a sequence's first token. ``tail``
    [blocks, W - 1, C] remembers the last rows of x. ``page_table`` is that of the layer's group, of blocks of ``block_size``
    tokens."""
    if act not in ("silu", "identity"):
        raise OpError(f"causal_conv has the acts silu and identity and not {act}.")
    y, width = np.empty(x.shape, np.float32), weight.shape[1]
    taps, added = weight.astype(np.float64).T, 0.0 if bias is None else bias.astype(np.float64)
    for seq, start in enumerate(seq_starts):
        first, last = int(query_offsets[seq]), int(query_offsets[seq + 1])
        rows = np.concatenate((_before(tail, page_table[seq], int(start), block_size), x[first:last]))
        for n in range(last - first):
            total = (rows[n : n + width].astype(np.float64) * taps).sum(axis=0) + added
            with np.errstate(over="ignore"):
                y[first + n] = total / (1 + np.exp(-total)) if act == "silu" else total
            _leave(tail, page_table[seq], int(start) + n, n + 1 == last - first, block_size, rows[n + 1 : n + width])
    return (y,)


def gated_delta(
    *,
    qkv: Array,
    decay: Array,
    beta: Array,
    seq_starts: Array,
    query_offsets: Array,
    page_table: Array,
    rate: Array,
    bias: Array,
    memory: Array,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
) -> tuple[Array]:
    """Linear attention by the gated delta rule: f32 [T, value_heads * value_dim].

    ``qkv`` [T, 2 * key_heads * key_dim + value_heads * value_dim] has queries, keys and values beside each other; ``decay`` and
    ``beta`` are [T, value_heads], ``rate`` and ``bias`` [value_heads]. Queries and keys have length 1 (x / sqrt(|x|^2 + 1e-6)),
    and queries are divided by sqrt(key_dim). Value head h reads key head h * key_heads / value_heads, rounded down. A head's
    memory S [key_dim, value_dim] becomes, token by token,

        S = exp(rate * softplus(decay + bias)) * S;  S = S + k (sigmoid(beta) * (v - k S));  y = q S.

    ``rate`` is negative. ``memory`` is [blocks, value_heads, key_dim, value_dim]. Source: Yang et al., "Gated Delta Networks"
    (arXiv 2412.06464), as Qwen3-Next has it."""
    keys, share = key_heads * key_dim, value_heads // key_heads
    wide = qkv.astype(np.float64)
    q, k = (
        _unit(part.reshape(-1, key_heads, key_dim)).repeat(share, axis=1)
        for part in (wide[:, :keys], wide[:, keys : 2 * keys])
    )
    v, q = wide[:, 2 * keys :].reshape(-1, value_heads, value_dim), q * key_dim**-0.5
    kept = np.exp(rate.astype(np.float64) * np.logaddexp(0, decay.astype(np.float64) + bias))
    with np.errstate(over="ignore"):
        written = 1 / (1 + np.exp(-beta.astype(np.float64)))
    y = np.empty((len(qkv), value_heads, value_dim), np.float32)
    for seq, start in enumerate(seq_starts):
        first, last = int(query_offsets[seq]), int(query_offsets[seq + 1])
        state = _before(memory, page_table[seq], int(start), block_size).astype(np.float64)
        for t in range(first, last):
            state = state * kept[t, :, None, None]
            change = written[t, :, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state = _stored(state + k[t, :, :, None] * change[:, None])
            y[t] = np.einsum("hk,hkv->hv", q[t], state)
            _leave(memory, page_table[seq], int(start) + t - first, t + 1 == last, block_size, state)
    return (y.reshape(len(qkv), -1),)


def ssm_scan(
    *,
    xbc: Array,
    dt: Array,
    seq_starts: Array,
    query_offsets: Array,
    page_table: Array,
    rate: Array,
    bias: Array,
    skip: Array,
    memory: Array,
    heads: int,
    groups: int,
    state_dim: int,
    head_dim: int,
    block_size: int,
) -> tuple[Array]:
    """The scan of a state-space layer of Mamba-2: f32 [T, heads * head_dim].

    ``xbc`` [T, heads * head_dim + 2 * groups * state_dim] has x, B and C beside each other; ``dt`` is [T, heads], ``rate``,
    ``bias`` and ``skip`` [heads]. Head h reads B and C of group h * groups / heads, rounded down. A head's memory S
    [state_dim, head_dim] becomes, token by token, with d = softplus(dt + bias),

        S = exp(rate * d) * S + B (d * x);  y = C S + skip * x.

    ``rate`` is negative. ``memory`` is [blocks, heads, state_dim, head_dim]. Source: Dao and Gu, "Transformers are SSMs" (arXiv
    2405.21060)."""
    columns, wide = heads * head_dim, xbc.astype(np.float64)
    x = wide[:, :columns].reshape(-1, heads, head_dim)
    b, c = wide[:, columns:].reshape(-1, 2, groups, state_dim).repeat(heads // groups, axis=2).swapaxes(0, 1)
    step = np.logaddexp(0, dt.astype(np.float64) + bias)
    kept, written = np.exp(rate.astype(np.float64) * step), step[..., None] * x
    y = np.empty((len(xbc), heads, head_dim), np.float32)
    for seq, start in enumerate(seq_starts):
        first, last = int(query_offsets[seq]), int(query_offsets[seq + 1])
        state = _before(memory, page_table[seq], int(start), block_size).astype(np.float64)
        for t in range(first, last):
            state = _stored(state * kept[t, :, None, None] + b[t, :, :, None] * written[t, :, None])
            y[t] = np.einsum("hn,hnp->hp", c[t], state) + skip[:, None] * x[t]
            _leave(memory, page_table[seq], int(start) + t - first, t + 1 == last, block_size, state)
    return (y.reshape(len(xbc), -1),)


def _unit(x: Array) -> Array:
    found: Array = x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + NORM_EPS)
    return found


def _before(state: Array, table: Array, start: int, block_size: int) -> Array:
    """What a sequence remembers of the tokens before ``start``."""
    return state[table[(start - 1) // block_size]] if start else np.zeros(state.shape[1:], state.dtype)


def _stored(state: Array) -> Array:
    """As a block has it, so that no bit depends on where a step ends."""
    return state.astype(np.float32).astype(np.float64)


def _leave(state: Array, table: Array, position: int, last: bool, block_size: int, value: Array) -> None:
    """After the token at a position, if it ends its block or the step."""
    if last or (position + 1) % block_size == 0:
        state[table[position // block_size]] = value


_BATCHES: tuple[tuple[list[int], list[int], int], ...] = (
    # tokens before, tokens of the step, block size
    ([0], [1], 16),
    ([0, 15, 16, 17], [3, 1, 1, 1], 16),
    ([7, 0, 32], [20, 33, 2], 16),
    ([3, 4, 0, 1], [1, 2, 9, 3], 4),
)


def _remembered(rng: Generator, batch: Batch, block_size: int, shape: tuple[int, ...], scale: float) -> Array:
    """NaN but in the blocks that sequences go on from."""
    state = np.full((batch.blocks[0], *shape), np.nan, np.float32)
    for table, start in zip(batch.page_tables[0], batch.seq_starts, strict=True):
        if start:
            state[table[(start - 1) // block_size]] = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return state


def _f32(array: Array) -> tuple[str, Array, tuple[int, ...]]:
    return "F32", np.ascontiguousarray(array, np.float32).reshape(-1, array.shape[-1]).view(np.uint8), array.shape


def _of_batch(rng: Generator, n: int) -> tuple[Batch, int, Dims, dict[str, Array]]:
    starts, lengths, block_size = _BATCHES[n]
    batch = random_batch(rng, starts, lengths, (block_size,), len(starts))
    table = batch.page_tables[0]
    for row, start in zip(table, starts, strict=True):  # what lies behind the last token before has been given back
        row[: max(0, start - 1) // block_size] = 0
    inputs = {"seq_starts": batch.seq_starts, "query_offsets": batch.query_offsets, "page_table": table}
    return batch, block_size, Dims(T=len(batch.positions), S=len(starts), P=batch.width), inputs


def causal_conv_cases(rng: Generator) -> Iterator[Case]:
    for n, columns, width, act, biased in (
        (0, 64, 4, "silu", False),
        (1, 40, 4, "silu", True),
        (2, 200, 3, "identity", False),
        (3, 33, 2, "silu", False),
        (3, 72, 4, "identity", True),
    ):
        batch, block_size, dims, inputs = _of_batch(rng, n)
        weights = {"weight": _f32(rng.standard_normal((columns, width), np.float32))}
        if biased:
            weights["bias"] = _f32(rng.standard_normal(columns, np.float32))
        yield Case(
            f"{act} of {columns} columns{' and a bias' * biased}, filters of {width}, blocks of {block_size}, "
            f"{_BATCHES[n][0]} + {_BATCHES[n][1]}",
            dims,
            {"x": rng.standard_normal((dims.T, columns), np.float32), **inputs},
            weights,
            {"tail": _remembered(rng, batch, block_size, (width - 1, columns), 1.0)},
            {"block_size": block_size, "act": act},
        )


def gated_delta_cases(rng: Generator) -> Iterator[Case]:
    for n, key_heads, value_heads, key_dim, value_dim in (
        (0, 2, 4, 128, 128),
        (1, 2, 2, 32, 48),
        (2, 1, 3, 16, 32),
        (3, 2, 6, 24, 20),
    ):
        batch, block_size, dims, inputs = _of_batch(rng, n)
        qkv = rng.standard_normal((dims.T, 2 * key_heads * key_dim + value_heads * value_dim), np.float32)
        qkv[0, :key_dim] = 0  # a query without a direction
        gates = {
            name: rng.standard_normal((dims.T, value_heads), np.float32) * np.float32(3) for name in ("decay", "beta")
        }
        gates["decay"][0, 0], gates["beta"][0, 0] = 90, -90  # where exp over- and underflows
        attrs: dict[str, Any] = {"key_heads": key_heads, "value_heads": value_heads}
        attrs |= {"key_dim": key_dim, "value_dim": value_dim, "block_size": block_size}
        yield Case(
            f"{key_heads}/{value_heads} heads of {key_dim}/{value_dim}, blocks of {block_size}, "
            f"{_BATCHES[n][0]} + {_BATCHES[n][1]}",
            dims,
            {"qkv": qkv, **gates, **inputs},
            {
                "rate": _f32(-np.exp(rng.uniform(-4, 2, value_heads))),
                "bias": _f32(rng.standard_normal(value_heads, np.float32)),
            },
            {"memory": _remembered(rng, batch, block_size, (value_heads, key_dim, value_dim), 0.3)},
            attrs,
        )


def ssm_scan_cases(rng: Generator) -> Iterator[Case]:
    for n, groups, heads, state_dim, head_dim in (
        (0, 1, 4, 128, 64),
        (1, 2, 4, 32, 48),
        (2, 3, 3, 16, 32),
        (3, 2, 6, 24, 20),
    ):
        batch, block_size, dims, inputs = _of_batch(rng, n)
        xbc = rng.standard_normal((dims.T, heads * head_dim + 2 * groups * state_dim), np.float32)
        xbc[:, heads * head_dim :] *= np.float32(0.3)  # as what is written may be 30 times x
        dt = rng.standard_normal((dims.T, heads), np.float32)
        dt[0, 0], dt[-1, -1] = 30, -90  # where exp over- and underflows
        weights = {"rate": -np.exp(rng.uniform(-4, 2, heads)), "bias": rng.standard_normal(heads, np.float32)}
        weights["skip"] = rng.standard_normal(heads, np.float32)
        yield Case(
            f"{heads} heads of {head_dim}, {groups} groups of {state_dim}, blocks of {block_size}, "
            f"{_BATCHES[n][0]} + {_BATCHES[n][1]}",
            dims,
            {"xbc": xbc, "dt": dt, **inputs},
            {name: _f32(array) for name, array in weights.items()},
            {"memory": _remembered(rng, batch, block_size, (heads, state_dim, head_dim), 0.3)},
            {
                "heads": heads,
                "groups": groups,
                "state_dim": state_dim,
                "head_dim": head_dim,
                "block_size": block_size,
            },
        )


_PLACE = ("seq_starts", "query_offsets", "page_table")
SPECS = (
    OpSpec(
        "causal_conv",
        inputs=("x", *_PLACE),
        weights=("weight", "bias?"),
        states=("tail",),
        outputs=("y",),
        attrs={"block_size": REQUIRED, "act": "silu"},
        reference=causal_conv,
        tolerance=Tolerance(2e-5, 2e-5),
        cases=causal_conv_cases,
    ),
    OpSpec(
        "gated_delta",
        inputs=("qkv", "decay", "beta", *_PLACE),
        weights=("rate", "bias"),
        states=("memory",),
        outputs=("y",),
        attrs={name: REQUIRED for name in ("key_heads", "value_heads", "key_dim", "value_dim", "block_size")},
        reference=gated_delta,
        tolerance=Tolerance(5e-5, 5e-5),
        cases=gated_delta_cases,
    ),
    OpSpec(
        "ssm_scan",
        inputs=("xbc", "dt", *_PLACE),
        weights=("rate", "bias", "skip"),
        states=("memory",),
        outputs=("y",),
        attrs={name: REQUIRED for name in ("heads", "groups", "state_dim", "head_dim", "block_size")},
        reference=ssm_scan,
        tolerance=Tolerance(5e-5, 5e-5),
        cases=ssm_scan_cases,
    ),
)
