"""Attention over the paged cache, in XLA's operations: tiles of queries, each over as many blocks as it sees. Decode steps
take the Pallas kernel where that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from engine.backend.v1 import Call

from .given import EXACT, Function, Given, Op, Site
from .kernel import paged_attention
from .shape import Shape

_TILE = 16
"""Queries of a sequence that are taken together in prompts."""
_CHUNK = 128
"""Cache entries that are looked at together."""
_AT_ONCE = 4
"""Tiles that are taken together in prompts."""


@dataclass(frozen=True)
class Tiles:
    """Work: rows of queries of one sequence each. ``seqs`` [N], ``rows`` i32 [N, tile] of the step, ``taken`` which of them
    are there; ``item`` and ``place`` [T]: where each token of the step is."""

    seqs: jax.Array
    rows: jax.Array
    taken: jax.Array
    item: jax.Array
    place: jax.Array


def tiles_of(offsets: jax.Array, tokens: int, tile: int) -> Tiles:
    """The step's tokens in tiles, at most tokens / tile and one more a sequence."""
    count = tokens // tile + len(offsets) - 1 if tile > 1 else tokens
    each = -(-jnp.diff(offsets) // tile)
    ends = jnp.cumsum(each)
    item = jnp.arange(count)
    seqs = jnp.minimum(jnp.searchsorted(ends, item, side="right"), len(each) - 1)
    first = offsets[seqs] + (item - (ends - each)[seqs]) * tile
    rows = first[:, None] + jnp.arange(tile)
    taken = (rows < offsets[seqs + 1][:, None]) & (item < ends[-1])[:, None]
    token = jnp.arange(tokens)
    own = jnp.searchsorted(offsets[1:], token, side="right")
    within = token - offsets[own]
    return Tiles(seqs, jnp.clip(rows, 0, tokens - 1), taken, (ends - each)[own] + within // tile, within % tile)


def attention(given: Given, shape: Shape) -> jax.Array:
    """softmax(scale * q k^T) v over what each token sees: f32 [T, heads * out_dim]."""
    q, offsets = given.wide("q"), given.inputs["query_offsets"]
    starts, table = given.inputs["seq_starts"], given.inputs["page_table"]
    tokens = len(q)
    tile = 1 if _is_decode(given) else _TILE
    tiles = tiles_of(offsets, tokens, tile)
    group = shape.heads // shape.kv_heads
    queries = q.reshape(tokens, shape.kv_heads, group, shape.head_dim)[tiles.rows]
    positions = starts[tiles.seqs][:, None] + tiles.rows - offsets[tiles.seqs][:, None]
    contexts = (starts + jnp.diff(offsets))[tiles.seqs]
    sinks = given.optional("sinks")

    def one(work: tuple[jax.Array, ...]) -> jax.Array:
        return _attend(given.states, shape, sinks, *work)

    work = (queries, positions, contexts, tiles.taken, table[tiles.seqs])
    y = jax.lax.map(one, work, batch_size=len(queries) if tile == 1 else _AT_ONCE)
    return y[tiles.item, tiles.place].reshape(tokens, shape.heads * shape.out_dim)


def _attend(
    states: Mapping[str, jax.Array],
    shape: Shape,
    sinks: jax.Array | None,
    queries: jax.Array,
    positions: jax.Array,
    context: jax.Array,
    taken: jax.Array,
    pages: jax.Array,
) -> jax.Array:
    """One tile: queries [tile, kv_heads, group, head_dim] at ``positions`` [tile], those ``taken``, of a sequence with
    ``context`` entries and the table row ``pages`` [P]. Entries that no query sees are left out by choice, so whatever lies
    there does no harm."""
    lead = queries.shape[:3]
    reach = 1 if shape.causal else shape.window or context
    end = jnp.where(taken, jnp.minimum(positions + reach, context), 0)  # what each query sees: from start to end
    start = jnp.maximum(positions + 1 - shape.window, 0) if shape.window else jnp.zeros_like(end)
    low, high = jnp.min(jnp.where(taken, start, jnp.iinfo(jnp.int32).max)), jnp.max(end)

    def chunk(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, mixed = carry
        entries = n * _CHUNK + jnp.arange(_CHUNK)
        block = pages[jnp.minimum(entries // shape.block_size, len(pages) - 1)]
        anyone = ((entries >= low) & (entries < high))[:, None, None]
        keys = _read(states, "k", block, entries % shape.block_size)
        if shape.value_dim:
            values = keys[..., : shape.value_dim]
        else:
            values = _read(states, "v", block, entries % shape.block_size)
        values = jnp.where(anyone, values, 0)
        scores = jnp.einsum("thgd,chd->thgc", queries, keys, precision=EXACT) * shape.scale
        if shape.softcap:
            scores = shape.softcap * jnp.tanh(scores / shape.softcap)
        seen = (entries >= start[:, None]) & (entries < end[:, None])
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        more = jnp.maximum(most, scores.max(axis=-1))
        usable = jnp.where(more == -jnp.inf, 0, more)  # a query that has seen nothing yet
        weights, kept = jnp.exp(scores - usable[..., None]), jnp.exp(most - usable)
        mixed = mixed * kept[..., None] + jnp.einsum("thgc,chd->thgd", weights, values, precision=EXACT)
        return more, total * kept + weights.sum(axis=-1), mixed

    if sinks is None:
        most, total = jnp.full(lead, -jnp.inf), jnp.zeros(lead)
    else:
        most, total = jnp.broadcast_to(sinks.reshape(shape.kv_heads, -1), lead), jnp.ones(lead)
    carry = (most, total, jnp.zeros((*lead, shape.out_dim)))
    _, total, mixed = jax.lax.fori_loop(low // _CHUNK, -(-high // _CHUNK), chunk, carry)
    return mixed / jnp.where(taken[:, None, None, None], total[..., None], 1)


def _read(states: Mapping[str, jax.Array], kind: str, block: jax.Array, offset: jax.Array) -> jax.Array:
    """Cache entries, f32 [entries, kv_heads, head_dim]."""
    found = states[kind][block, offset].astype(jnp.float32)
    scale = states.get(f"{kind}_scale")
    return found if scale is None else found * scale[block, offset][..., None]


def _attention(call: Call, site: Site) -> Function:
    shape = Shape.of(call)

    def run(given: Given) -> tuple[jax.Array, ...]:
        if site.pallas and shape.causal and _is_decode(given):  # the kernel sees nothing after a query
            return (paged_attention(given, shape, site.interpret),)
        return (attention(given, shape),)

    return run


def _is_decode(given: Given) -> bool:
    """A step that may have a sequence for each of its tokens."""
    return len(given.inputs["q"]) <= len(given.inputs["seq_starts"])


FEATURES = frozenset({"window", "softcap", "v_head_dim", "sinks", "contiguous", "causal", "k_scale", "v_scale"})
OPS: Mapping[str, Op] = {"attention": Op(FEATURES, _attention, cached=True)}
