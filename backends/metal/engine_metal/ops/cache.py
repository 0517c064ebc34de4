"""The paged KV cache: kv_write, kv_copy, and attention with keys and values gathered page by page."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ..kernels.launches import paged_decode, rope_rows
from ..operands import Operands
from .rows import rms_normed, turned

CHUNK = 256
"""Queries of one sequence that attend at a time: their scores take this many rows of memory."""


def kv_write(o: Operands) -> tuple[mx.array, ...]:
    _write(o, _stored(o, "k", o.wide("new_k")) | ({} if o.attr("latent") else _stored(o, "v", o.wide("new_v"))))
    return ()


def rope_kv_write(o: Operands) -> tuple[mx.array, ...]:
    if o.kernels is not None:
        y, made = rope_rows(o, o.kernels)
        _write(o, made)
        return (y,)
    q, k = o.wide("q"), o.wide("new_k")
    if o.has("q_norm"):
        q, k = rms_normed(o, q, "q_norm"), rms_normed(o, k, "k_norm")
    _write(o, _stored(o, "k", turned(o, k, o.attr("kv_heads"))) | _stored(o, "v", o.wide("new_v")))
    return (turned(o, q, o.attr("heads")),)


def _write(o: Operands, made: Mapping[str, mx.array]) -> None:
    """Rows [T, kv_heads, ...] of each state at kv_slots. Tokens with a negative slot are not stored: they repeat what the
    first of the others stores."""
    slots = o["kv_slots"]
    taken = slots >= 0
    first = mx.argmax(taken)
    stored, source = mx.where(taken, slots, mx.maximum(slots[first], 0)), mx.where(taken, mx.arange(len(slots)), first)
    size = o.state("k").shape[1]
    place = stored // size, stored % size
    for name, rows in made.items():
        cache = o.state(name)
        # Where no token is taken at all, what is there is written back.
        cache[place] = mx.where(taken.any(), rows[source], cache[place])
        o.put_state(name, cache)


def _stored(o: Operands, name: str, new: mx.array) -> dict[str, mx.array]:
    """New keys or values [T, kv_heads * head_dim] as their states hold them."""
    heads, dtype = new.reshape(len(new), o.attr("kv_heads"), o.attr("head_dim")), o.state(name).dtype
    if dtype != mx.int8:
        return {name: heads.astype(dtype)}
    scale = mx.abs(heads).max(axis=-1) / 127
    usable = (mx.isfinite(scale) & (scale > 0))[..., None]
    steps = mx.where(usable, mx.round(heads / scale[..., None]), 0)
    return {name: mx.clip(steps, -127, 127).astype(mx.int8), f"{name}_scale": scale}


def kv_copy(o: Operands) -> tuple[mx.array, ...]:
    """Block by block: a copy may read what the one before it has written."""
    copies = o["block_copies"]
    for name in o.bound.call.states:
        state = o.state(name)
        for n in range(len(copies)):
            state[copies[n, 1]] = state[copies[n, 0]]
        o.put_state(name, state)
    return ()


def attention(o: Operands) -> tuple[mx.array, ...]:
    """Where every sequence has one query all attend at once; else the leading ones that have one, and each of the others by
    itself."""
    tokens, sequences = o.dims.T, o.dims.S
    if tokens == sequences:
        return (_decode(o, tokens),)
    offsets, starts = o.on_host("query_offsets"), o.on_host("seq_starts")
    singles = 0
    while singles < sequences and offsets[singles + 1] == singles + 1:
        singles += 1
    parts = [_decode(o, singles)] if singles else []
    for seq in range(singles, sequences):
        start, last = int(starts[seq]), int(offsets[seq + 1])
        for first in range(int(offsets[seq]), last, CHUNK):
            count = min(CHUNK, last - first)
            position = start + first - int(offsets[seq])
            parts.append(_chunk(o, seq, first, count, position, position + last - first))
    return (mx.concatenate(parts),)


def _chunk(o: Operands, seq: int, first: int, count: int, start: int, context: int) -> mx.array:
    """``count`` queries of a sequence of ``context`` entries from row ``first``, at the positions from ``start`` on."""
    window, size = o.attr("window"), o.attr("block_size")
    low = max(0, start + 1 - window) // size if window else 0
    reach = 1 if o.attr("causal") else window or context
    end = min(start + count - 1 + reach, context)
    keys = mx.arange(low * size, end)
    queries = mx.arange(start, start + count)[:, None]
    seen = keys < queries + reach
    if window:
        seen = seen & (keys > queries - window)
    blocks = o["page_table"][seq, low : -(-end // size)]
    k, v = (_pages(o, kind, blocks[None], end - low * size) for kind in ("k", "v"))
    # Behind the window of all queries nothing is read; what the table has there may be anything.
    shown = seen.any(axis=0)[None, :, None, None]
    q = o.wide("q")[first : first + count][None]
    return _attend(o, q, mx.where(shown, k, 0), mx.where(shown, v, 0), seen[None])[0]


def _decode(o: Operands, count: int) -> mx.array:
    """The first ``count`` sequences, of one query each: the last of its sequence, which sees the same if not causal."""
    if o.kernels is not None:
        return paged_decode(o, count, o.kernels)
    window, table = o.attr("window"), o["page_table"][:count]
    starts = o["seq_starts"][:count, None]
    keys = mx.arange(table.shape[1] * o.attr("block_size"))
    seen = keys <= starts
    if window:
        seen = seen & (keys > starts - window)
    # What is not seen may be NaN, and 0 * NaN would be that, too.
    k, v = (mx.where(seen[..., None, None], _pages(o, kind, table, len(keys)), 0) for kind in ("k", "v"))
    return _attend(o, o.wide("q")[:count, None], k, v, seen[:, None])[:, 0]


def _pages(o: Operands, kind: str, blocks: mx.array, count: int) -> mx.array:
    """The first ``count`` entries of each row of ``blocks`` [n, pages]: f32 [n, count, kv_heads, width]. Values of a latent
    cache are the first columns of its keys."""
    latent = o.attr("v_head_dim") if kind == "v" else 0
    stored = o.state("k" if latent else kind)[blocks]
    entries = stored.reshape(len(blocks), -1, *stored.shape[3:])[:, :count].astype(mx.float32)
    if o.has(f"{kind}_scale") or (latent and o.has("k_scale")):
        scale = o.state("k_scale" if latent else f"{kind}_scale")[blocks]
        entries = entries * scale.reshape(len(blocks), -1, scale.shape[3])[:, :count, :, None]
    return entries[..., :latent] if latent else entries


def _attend(o: Operands, q: mx.array, k: mx.array, v: mx.array, seen: mx.array) -> mx.array:
    """q [n, rows, heads * head_dim], k and v [n, keys, kv_heads, width], seen [n, rows, keys]: [n, rows, heads * width]."""
    count, rows, heads, kv_heads = q.shape[0], q.shape[1], o.attr("heads"), o.attr("kv_heads")
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    if not o.attr("softcap"):
        q, sinks = (
            q.reshape(count, rows, heads, -1).transpose(0, 2, 1, 3),
            o.vector("sinks") if o.has("sinks") else None,
        )
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=o.attr("scale"), mask=seen[:, None], sinks=sinks)
        return y.transpose(0, 2, 1, 3).reshape(count, rows, -1)
    q = q.reshape(count, rows, kv_heads, heads // kv_heads, -1).transpose(0, 2, 3, 1, 4)
    scores = q @ k.swapaxes(2, 3)[:, :, None] * o.attr("scale")
    scores = o.attr("softcap") * mx.tanh(scores / o.attr("softcap"))
    shares = mx.softmax(mx.where(seen[:, None, None], scores, -mx.inf), axis=-1, precise=True)
    y = shares @ v[:, :, None]
    return y.transpose(0, 3, 1, 2, 4).reshape(count, rows, -1)
