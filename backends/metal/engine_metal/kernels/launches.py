"""Ops' calls as launches of kernels."""

from __future__ import annotations

import mlx.core as mx

from ..operands import Operands
from . import Kernel, Launch, Run

LANES = 32
GROUPS = 8
PAGED_ATTENTION = Kernel(
    "paged_attention",
    ("q", "seq_starts", "page_table", "k", "v", "k_scale", "v_scale", "sinks", "params"),
    ("y",),
)
ROPE_ROWS = Kernel(
    "rope_rows",
    ("q", "new_k", "new_v", "positions", "inv_freq", "q_norm", "k_norm", "params"),
    ("y", "k", "v", "k_scale", "v_scale"),
)
DENSE_ROWS = Kernel("dense_rows", ("x", "weight"), ("y",))
ABSENT = mx.array([0.0])
"""In the place of an operand that a call has not."""


def dense_rows(x: mx.array, weight: mx.array, run: Run) -> mx.array:
    """x f32 [rows, K] times the transposed weight [N, K] in any type: f32 [rows, N]."""
    rows, (columns, depth) = len(x), weight.shape
    template = [("K", depth), ("N", columns)]
    outputs = [((rows, columns), mx.float32)]
    return run(Launch(DENSE_ROWS, [x, weight], template, (LANES, columns, rows), (LANES, 1, 1), outputs))[0]


def paged_decode(o: Operands, count: int, run: Run) -> mx.array:
    """Attention of the first ``count`` sequences, of one query each: f32 [count, heads * width]."""
    heads, depth, latent = o.attr("heads"), o.attr("head_dim"), o.attr("v_head_dim")
    cache = {name: o.state(name) if o.has(name) else ABSENT for name in ("k", "v", "k_scale", "v_scale")}
    params = mx.array([o.attr("scale"), o.attr("softcap")], mx.float32)
    sinks = o.vector("sinks") if o.has("sinks") else ABSENT
    template = [
        ("D", depth),
        ("DV", latent or depth),
        ("HEADS", heads),
        ("KV_HEADS", o.attr("kv_heads")),
        ("BLOCK", o.attr("block_size")),
        ("WINDOW", o.attr("window")),
        ("GROUPS", GROUPS),
        ("INT8", o.has("k_scale")),
        ("LATENT", bool(latent)),
        ("SINKS", o.has("sinks")),
    ]
    operands = [o.wide("q")[:count], o["seq_starts"][:count], o["page_table"][:count], *cache.values(), sinks, params]
    outputs = [((count, heads * (latent or depth)), mx.float32)]
    grid, threadgroup = (LANES * GROUPS, heads, count), (LANES * GROUPS, 1, 1)
    return run(Launch(PAGED_ATTENTION, operands, template, grid, threadgroup, outputs))[0]


def rope_rows(o: Operands, run: Run) -> tuple[mx.array, dict[str, mx.array]]:
    """Of a rope_kv_write q, f32 [T, heads * head_dim], and what is written of each state, [T, kv_heads, ...] in its type."""
    tokens, heads, kv_heads, depth = o.dims.T, o.attr("heads"), o.attr("kv_heads"), o.attr("head_dim")
    stored, int8 = o.state("k").dtype, o.has("k_scale")
    norms = [o.vector(name) if o.has(name) else ABSENT for name in ("q_norm", "k_norm")]
    params = mx.array([o.attr("eps"), o.attr("weight_offset"), o.attr("scale")], mx.float32)
    template = [
        ("T", stored),
        ("D", depth),
        ("ROTARY", o.attr("rotary_dim") or depth),
        ("HEADS", heads),
        ("KV_HEADS", kv_heads),
        ("NORMED", o.has("q_norm")),
        ("INTERLEAVED", o.attr("interleaved")),
        ("INT8", int8),
    ]
    operands = [o.wide("q"), o.wide("new_k"), o.wide("new_v"), o["positions"], o.vector("inv_freq"), *norms, params]
    rows, scales = (tokens, kv_heads, depth), (tokens, kv_heads) if int8 else (1,)
    outputs = [((tokens, heads * depth), mx.float32), (rows, stored), (rows, stored)]
    outputs += [(scales, mx.float32), (scales, mx.float32)]
    grid, threadgroup = (LANES, heads + 2 * kv_heads, tokens), (LANES, 1, 1)
    y, *made = run(Launch(ROPE_ROWS, operands, template, grid, threadgroup, outputs))
    return y, {name: array for name, array in zip(("k", "v", "k_scale", "v_scale"), made, strict=True) if o.has(name)}
