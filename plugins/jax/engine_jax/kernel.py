"""Decode attention as a Pallas kernel: a query at a time, block by block of its sequence's cache, fetched by the page table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .given import EXACT, Given
from .shape import Shape

_KINDS: tuple[str, ...] = ("k", "v", "k_scale", "v_scale")


def paged_attention(given: Given, shape: Shape, interpret: bool) -> jax.Array:
    """softmax(scale * q k^T) v over what each token sees: f32 [T, heads * out_dim]. For steps of few tokens a sequence."""
    q, offsets = given.wide("q"), given.inputs["query_offsets"]
    tokens = jnp.arange(len(q))
    sequence = jnp.searchsorted(offsets[1:], tokens, side="right")
    ends = given.inputs["seq_starts"][sequence] + tokens - offsets[sequence] + 1
    tables = given.inputs["page_table"][sequence]
    sinks = given.optional("sinks")
    if sinks is None:
        sinks = jnp.full(shape.heads, -jnp.inf, jnp.float32)
    states = {name: given.states[name] for name in _KINDS if name in given.states}
    y = _call(q.reshape(len(q), shape.heads, shape.head_dim), tables, ends, sinks[:, None], states, shape, interpret)
    return y.reshape(len(q), -1)


def _call(
    q: jax.Array,
    tables: jax.Array,
    ends: jax.Array,
    sinks: jax.Array,
    states: Mapping[str, jax.Array],
    shape: Shape,
    interpret: bool,
) -> jax.Array:
    tokens, pages = tables.shape
    size, heads = shape.block_size, shape.heads

    def needed(token: jax.Array, page: jax.Array, ends: jax.Array) -> jax.Array:
        """The page itself where the token sees it, else the nearest that it does see, which is there already."""
        last = (ends[token] - 1) // size
        first = jnp.maximum(ends[token] - shape.window, 0) // size if shape.window else 0
        return jnp.clip(page, first, last)

    def block(state: jax.Array) -> pl.BlockSpec:
        rest = (0,) * (state.ndim - 1)
        return pl.BlockSpec((1, *state.shape[1:]), lambda t, p, tables, ends: (tables[t, needed(t, p, ends)], *rest))

    of_token = pl.BlockSpec((1, heads, shape.head_dim), lambda t, p, *_: (t, 0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(tokens, pages),
        in_specs=[of_token, pl.BlockSpec(sinks.shape, lambda t, p, *_: (0, 0)), *map(block, states.values())],
        out_specs=pl.BlockSpec((1, heads, shape.out_dim), lambda t, p, *_: (t, 0, 0)),
        scratch_shapes=[
            pltpu.VMEM((heads, 1), jnp.float32),
            pltpu.VMEM((heads, 1), jnp.float32),
            pltpu.VMEM((heads, shape.out_dim), jnp.float32),
        ],
    )
    run = pl.pallas_call(
        partial(_kernel, shape=shape, names=tuple(states)),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((tokens, heads, shape.out_dim), jnp.float32),
        interpret=interpret,
    )
    result: jax.Array = run(tables, ends, q, sinks, *states.values())
    return result


def _kernel(tables: Any, ends: Any, q: Any, sinks: Any, *refs: Any, shape: Shape, names: tuple[str, ...]) -> None:
    """One block for one token; the arguments are references to what the specs of the call put in fast memory."""
    states, (y, most, total, mixed) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    token, page, size = pl.program_id(0), pl.program_id(1), shape.block_size
    end = ends[token]
    start = jnp.maximum(end - shape.window, 0) if shape.window else 0

    @pl.when(page == 0)
    def _() -> None:
        given = sinks[...] > -jnp.inf
        most[...] = sinks[...]
        total[...] = jnp.where(given, 1.0, 0.0)
        mixed[...] = jnp.zeros_like(mixed)

    @pl.when((page * size < end) & ((page + 1) * size > start))
    def _() -> None:
        entries = page * size + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
        seen = (entries >= start) & (entries < end)
        group = shape.heads // shape.kv_heads
        for head in range(shape.kv_heads):
            rows = slice(head * group, (head + 1) * group)
            keys = _read(states, "k", head)
            values = keys[:, : shape.value_dim] if shape.value_dim else _read(states, "v", head)
            scores = jnp.dot(q[0, rows], keys.T, precision=EXACT, preferred_element_type=jnp.float32) * shape.scale
            if shape.softcap:
                scores = shape.softcap * jnp.tanh(scores / shape.softcap)
            scores = jnp.where(seen, scores, -jnp.inf)
            before = most[rows]
            more = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            usable = jnp.where(more == -jnp.inf, 0, more)
            weights, kept = jnp.exp(scores - usable), jnp.exp(before - usable)
            values = jnp.where(seen.T, values, 0)
            most[rows] = more
            total[rows] = total[rows] * kept + weights.sum(axis=1, keepdims=True)
            added = jnp.dot(weights, values, precision=EXACT, preferred_element_type=jnp.float32)
            mixed[rows] = mixed[rows] * kept + added

    @pl.when(page == pl.num_programs(1) - 1)
    def _() -> None:
        y[0] = mixed[...] / total[...]


def _read(states: Mapping[str, Any], kind: str, head: int) -> jax.Array:
    """A head's entries of the block, f32 [block_size, head_dim]."""
    found = states[kind][0, :, head].astype(jnp.float32)
    scale = states.get(f"{kind}_scale")
    return found if scale is None else found * scale[0, :, head][:, None]
