"""Attention over the paged KV cache: one op for prefill, decode and mixed steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..backend.v1 import Array, Dims, KVSpec
from .cases import random_batch
from .kv import PLAIN, read_kv
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance


def attention(
    *,
    q: Array,
    seq_starts: Array,
    query_offsets: Array,
    page_table: Array,
    k: Array,
    v: Array,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    block_size: int,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    contiguous: bool = False,
) -> tuple[Array]:
    """softmax(scale * q k^T) v: q [T, heads * head_dim] -> f32 of the same shape; k and v in the plain layout.

    A query at position p sees cache positions 0..p, with a ``window`` w > 0 only the last w of them. ``softcap`` c > 0
    bounds scores as c * tanh(score / c). Query head h reads KV head h * kv_heads / heads, rounded down. Each query is
    computed by itself in f64, so that its result depends on neither the other rows nor the chunks. The table's entries
    for blocks that no query of the step sees are null. ``contiguous`` promises that a sequence's entries are consecutive
    blocks, which a provider may use or not. Sources: Vaswani et al. (2017); for grouped queries, Ainslie et al. (2023).
    """
    y = np.empty((len(q), heads * head_dim), np.float32)
    for seq, start in enumerate(seq_starts):
        first, last = int(query_offsets[seq]), int(query_offsets[seq + 1])
        context = int(start) + last - first
        keys = _context(k, k_scale, page_table[seq], context, block_size)
        values = _context(v, v_scale, page_table[seq], context, block_size)
        for row in range(first, last):
            end = int(start) + row - first + 1
            seen = slice(max(0, end - window) if window else 0, end)
            queries = q[row].astype(np.float64).reshape(kv_heads, heads // kv_heads, head_dim)
            y[row] = _attend(queries, keys[:, seen], values[:, seen], scale, softcap).reshape(-1)
    return (y,)


def _context(stored: Array, scale: Array | None, table: Array, context: int, block_size: int) -> Array:
    """The first ``context`` cache entries of a sequence, f64 [kv_heads, context, head_dim]."""
    positions = np.arange(context)
    blocks, offsets = table[positions // block_size], positions % block_size
    entries = read_kv(stored[blocks, offsets], None if scale is None else scale[blocks, offsets])
    return entries.astype(np.float64).swapaxes(0, 1)


def _attend(queries: Array, keys: Array, values: Array, scale: float, softcap: float) -> Array:
    """One token: queries [kv_heads, group, head_dim], keys and values [kv_heads, n, head_dim]."""
    scores = queries @ keys.swapaxes(1, 2) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: Array = weights @ values / weights.sum(axis=-1, keepdims=True)
    return mixed


def attention_cases(rng: Generator) -> Iterator[Case]:
    shapes: list[tuple[list[int], list[int], int, int, int, int, str, dict[str, Any]]] = [
        # tokens before, query lengths, block size, heads, kv heads, head_dim, dtype, features
        ([0], [1], 16, 1, 1, 64, "f32", {}),
        ([0], [37], 16, 4, 2, 32, "f32", {}),
        ([15, 16, 17, 100], [1, 1, 1, 1], 16, 8, 2, 64, "f16", {}),
        ([70, 9, 0, 20], [1, 1, 21, 15], 16, 8, 8, 48, "f32", {}),
        ([300, 0], [1, 5], 32, 8, 1, 128, "bf16", {}),
        ([40, 3], [1, 30], 8, 4, 4, 16, "int8", {}),
        ([129, 0, 64], [1, 33, 1], 16, 16, 2, 64, "int8", {}),
        ([5, 0], [1, 6], 1, 2, 1, 8, "f16", {}),
        ([90, 0], [1, 40], 16, 4, 2, 32, "f16", {"window": 24}),
        ([301, 90], [1, 40], 8, 4, 2, 32, "int8", {"window": 24}),
        ([45, 0, 20], [3, 9, 1], 4, 4, 2, 16, "f16", {"window": 7, "contiguous": True}),
        ([33, 2], [1, 12], 16, 4, 1, 32, "f32", {"softcap": 5.0}),
        ([50], [9], 8, 2, 2, 16, "f32", {"window": 1, "softcap": 2.0}),
    ]
    for starts, lengths, block_size, heads, kv_heads, head_dim, dtype, features in shapes:
        batch = random_batch(rng, starts, lengths, (block_size,), len(starts))
        table = batch.page_tables[0]
        kv = KVSpec(batch.blocks[0], block_size, kv_heads, head_dim, dtype)
        total = len(batch.positions)
        contents = {name: np.full(PLAIN.shapes(kv)["k"][0], np.nan, np.float32) for name in ("k", "v")}
        for seq, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            positions = np.arange(start + length)
            place = table[seq, positions // block_size], positions % block_size
            for stored in contents.values():
                stored[place] = rng.standard_normal((len(positions), kv_heads, head_dim), np.float32)
            if window := features.get("window", 0):
                table[seq, : max(0, start + 1 - window) // block_size] = 0
        yield Case(
            f"{dtype}, {heads}/{kv_heads} heads of {head_dim}, blocks of {block_size}, "
            f"{starts} + {lengths}{''.join(f', {k} {v}' for k, v in features.items())}",
            Dims(T=total, S=len(starts), P=batch.width),
            {
                "q": rng.standard_normal((total, heads * head_dim), np.float32) * np.float32(2),
                "seq_starts": batch.seq_starts,
                "query_offsets": batch.query_offsets,
                "page_table": table,
            },
            states=contents,
            attrs={
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "scale": head_dim**-0.5,
                "block_size": block_size,
                **features,
            },
            kv=kv,
        )


SPECS = (
    OpSpec(
        "attention",
        inputs=("q", "seq_starts", "query_offsets", "page_table"),
        states=("k", "v", "k_scale?", "v_scale?"),
        outputs=("y",),
        attrs={
            "heads": REQUIRED,
            "kv_heads": REQUIRED,
            "head_dim": REQUIRED,
            "scale": REQUIRED,
            "block_size": REQUIRED,
            "window": 0,
            "softcap": 0.0,
            "contiguous": False,
        },
        reference=attention,
        tolerance=Tolerance(5e-5, 5e-5),
        cases=attention_cases,
    ),
)
