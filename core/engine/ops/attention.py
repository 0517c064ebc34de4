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
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    block_size: int,
    v: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    window: int = 0,
    softcap: float = 0.0,
    v_head_dim: int = 0,
    sinks: Array | None = None,
    contiguous: bool = False,
    causal: bool = True,
) -> tuple[Array]:
    """softmax(scale * q k^T) v: q [T, heads * head_dim] -> f32 of the same shape; k and v in the plain layout.

    A query at position p sees cache positions 0..p, with a ``window`` w > 0 only the last w of them. Without ``causal`` it
    sees all positions of its sequence, those that this step writes included, with a window those less than w away, before
    it and behind it (encoders: Devlin et al. 2018, arXiv 1810.04805). ``softcap`` c > 0 bounds scores as
    c * tanh(score / c). ``sinks`` [heads] are scores that each token of a head has beside those of its keys: they take part
    in the softmax and bring no value. Query head h reads KV head h * kv_heads / heads, rounded down. Each query is computed
    by itself in f64, so that its result depends on neither the other rows nor the chunks. The table's entries for blocks
    that no query of the step sees are null. ``contiguous`` promises that a sequence's entries are consecutive blocks, which
    a provider may use or not. Sources: Vaswani et al. (2017); for grouped queries, Ainslie et al. (2023); for sinks, the
    gpt-oss model card (arXiv 2508.10925).

    ``v_head_dim`` d > 0: a latent cache, where the first d columns of a key are the value. There is no v and no v_scale,
    and the result is [T, heads * d] (DeepSeek-V2, arXiv 2405.04434, in the absorbed form).
    """
    y = np.empty((len(q), heads * (v_head_dim or head_dim)), np.float32)
    beside = None if sinks is None else sinks.astype(np.float64).reshape(kv_heads, -1, 1)
    for seq, start in enumerate(seq_starts):
        first, last = int(query_offsets[seq]), int(query_offsets[seq + 1])
        context = int(start) + last - first
        keys = _context(k, k_scale, page_table[seq], context, block_size)
        values = keys[..., :v_head_dim] if v is None else _context(v, v_scale, page_table[seq], context, block_size)
        for row in range(first, last):
            own = int(start) + row - first
            end = own + 1 if causal else min(context, own + window) if window else context
            seen = slice(max(0, own + 1 - window) if window else 0, end)
            queries = q[row].astype(np.float64).reshape(kv_heads, heads // kv_heads, head_dim)
            y[row] = _attend(queries, keys[:, seen], values[:, seen], scale, softcap, beside).reshape(-1)
    return (y,)


def _context(stored: Array, scale: Array | None, table: Array, context: int, block_size: int) -> Array:
    """The first ``context`` cache entries of a sequence, f64 [kv_heads, context, head_dim]."""
    positions = np.arange(context)
    blocks, offsets = table[positions // block_size], positions % block_size
    entries = read_kv(stored[blocks, offsets], None if scale is None else scale[blocks, offsets])
    return entries.astype(np.float64).swapaxes(0, 1)


def _attend(queries: Array, keys: Array, values: Array, scale: float, softcap: float, sinks: Array | None) -> Array:
    """One token: queries [kv_heads, group, head_dim], keys and values [kv_heads, n, head_dim], sinks [kv_heads, group, 1]."""
    scores = queries @ keys.swapaxes(1, 2) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    most = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        most = np.maximum(most, sinks)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - most)
    mixed: Array = weights @ values / total
    return mixed


def attention_cases(rng: Generator) -> Iterator[Case]:
    shapes: list[tuple[list[int], list[int], int, int, int, int, str, dict[str, Any]]] = [
        # tokens before, query lengths, block size, heads, kv heads, head_dim, dtype, features
        ([0], [1], 16, 1, 1, 64, "f32", {}),
        ([0], [37], 16, 4, 2, 32, "f32", {}),
        ([15, 16, 17, 100, 0, 47, 31, 2, 64], [1] * 9, 16, 8, 2, 64, "f16", {}),
        ([70, 9, 0, 20], [1, 1, 21, 15], 16, 8, 8, 48, "f32", {}),
        ([300, 0], [1, 5], 32, 8, 1, 128, "bf16", {}),
        ([40, 3], [1, 30], 8, 4, 4, 16, "int8", {}),
        ([140, 3], [1, 70], 16, 4, 2, 40, "int16", {}),
        ([300, 0, 5], [2, 1, 30], 8, 8, 1, 64, "int16", {"window": 100, "sinks": -1.0}),
        ([129, 0, 64], [1, 33, 1], 16, 16, 2, 64, "int8", {}),
        ([5, 0], [1, 6], 1, 2, 1, 8, "f16", {}),
        ([90, 0], [1, 40], 16, 4, 2, 32, "f16", {"window": 24}),
        ([301, 90], [1, 40], 8, 4, 2, 32, "int8", {"window": 24}),
        ([45, 0, 20], [3, 9, 1], 4, 4, 2, 16, "f16", {"window": 7, "contiguous": True}),
        ([33, 2], [1, 12], 16, 4, 1, 32, "f32", {"softcap": 5.0}),
        ([50], [9], 8, 2, 2, 16, "f32", {"window": 1, "softcap": 2.0}),
        ([0, 45], [20, 1], 16, 4, 1, 32, "f32", {"v_head_dim": 24}),
        ([17, 70, 0], [1, 1, 9], 16, 16, 1, 576, "f16", {"v_head_dim": 512}),
        ([30, 2], [3, 20], 8, 5, 1, 40, "bf16", {"v_head_dim": 25, "window": 12}),
        ([100, 0], [1, 18], 32, 8, 1, 80, "int8", {"v_head_dim": 64}),
        ([100, 0], [1, 18], 32, 8, 1, 80, "int16", {"v_head_dim": 64}),
        ([300, 0], [1, 40], 16, 8, 2, 64, "f16", {"sinks": 4.0}),
        ([290, 20], [1, 30], 16, 6, 6, 32, "int8", {"sinks": -4.0, "window": 24}),
        ([129, 0, 64], [1, 33, 1], 16, 8, 2, 64, "fp8", {}),
        ([90, 0], [1, 18], 8, 8, 1, 40, "fp8", {"v_head_dim": 24, "window": 24}),
        ([0, 0, 0], [37, 1, 150], 16, 4, 4, 32, "f16", {"causal": False}),
        ([0, 40, 0], [300, 3, 2], 16, 4, 2, 64, "int16", {"causal": False}),
        ([0, 0], [170, 9], 8, 4, 1, 48, "int8", {"causal": False, "window": 24, "softcap": 9.0}),
    ]
    for starts, lengths, block_size, heads, kv_heads, head_dim, dtype, features in shapes:
        batch = random_batch(rng, starts, lengths, (block_size,), len(starts))
        table = batch.page_tables[0]
        kv = KVSpec(batch.blocks[0], block_size, kv_heads, head_dim, dtype, "v_head_dim" in features)
        total = len(batch.positions)
        names = ("k",) if kv.latent else ("k", "v")
        contents = {name: np.full(PLAIN.shapes(kv)["k"][0], np.nan, np.float32) for name in names}
        for seq, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            positions = np.arange(start + length)
            place = table[seq, positions // block_size], positions % block_size
            for stored in contents.values():
                stored[place] = rng.standard_normal((len(positions), kv_heads, head_dim), np.float32)
            if window := features.get("window", 0):
                table[seq, : max(0, start + 1 - window) // block_size] = 0
        attrs, weights = dict(features), {}
        if (level := attrs.pop("sinks", None)) is not None:
            sinks = rng.standard_normal(heads, np.float32) + np.float32(level)
            weights["sinks"] = ("F32", sinks.view(np.uint8)[None], sinks.shape)
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
            weights=weights,
            states=contents,
            attrs={
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "scale": head_dim**-0.5,
                "block_size": block_size,
                **attrs,
            },
            kv=kv,
        )


SPECS = (
    OpSpec(
        "attention",
        inputs=("q", "seq_starts", "query_offsets", "page_table"),
        weights=("sinks?",),
        # Without v where v_head_dim says so: marked "?" it would be a feature of all other calls.
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
            "v_head_dim": 0,
            "contiguous": False,
            "causal": True,
        },
        reference=attention,
        tolerance=Tolerance(5e-5, 5e-5),
        cases=attention_cases,
    ),
)
