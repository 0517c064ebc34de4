"""The KV cache: writing, copying, attention."""

from __future__ import annotations

import torch
import triton.language as tl

from ..kernels import attention as kernels
from ..kernels import cache, position
from ..kernels.common import INTERPRETED, launch, power_of_two
from ..operands import Operands
from ..tiles import of_attention, precise

ELEMENTS = 1024
SPLIT = 512
"""Cached tokens of a part of a sequence with one query: a fixed size, so that a context is always cut alike."""


def kv_write(o: Operands) -> None:
    new_k, new_v, k, v = o["new_k"], o.get("new_v"), o.state("k"), o.state("v")
    heads, width, scales = o.attr("kv_heads"), o.attr("head_dim"), o.state("k_scale")
    launch(
        cache.kv_write, (len(new_k), 1 if new_v is None else 2), new_k, new_k if new_v is None else new_v, o["kv_slots"],
        k, k if v is None else v, k if scales is None else scales, k if v is None or scales is None else o.state("v_scale"),
        heads, width, SCALED=scales is not None, HEADS=power_of_two(heads), WIDTH=power_of_two(width),
    )  # fmt: skip


def kv_copy(o: Operands) -> None:
    copies = o["block_copies"]
    for state in o.states() if len(copies) else ():
        size = state[0].numel()
        launch(cache.kv_copy, (-(-size // ELEMENTS),), state, copies, len(copies), size, BLOCK=ELEMENTS)


def rope_kv_write(o: Operands) -> None:
    q, k, inv_freq, scales = o["q"], o.state("k"), o.vector("inv_freq"), o.state("k_scale")
    heads, kv_heads, width = (o.attr(name) for name in ("heads", "kv_heads", "head_dim"))
    q_norm, k_norm = o.vector("q_norm"), o.vector("k_norm")
    y = o.result(0, *q.shape)
    launch(
        position.rope_kv_write, (len(q), 3), q, o["new_k"], o["new_v"], o["positions"], o["kv_slots"], inv_freq,
        inv_freq if q_norm is None else q_norm, inv_freq if k_norm is None else k_norm, y, k, o.state("v"),
        k if scales is None else scales, k if scales is None else o.state("v_scale"), heads, kv_heads, width,
        o.attr("rotary_dim") or width, o.attr("scale"), o.attr("eps"), o.attr("weight_offset"),
        NORMED=q_norm is not None, INTERLEAVED=o.attr("interleaved"), SCALED=scales is not None,
        HEADS=power_of_two(heads), KV_HEADS=power_of_two(kv_heads), WIDTH=power_of_two(width),
    )  # fmt: skip


def _dot_type(q: torch.Tensor, k: torch.Tensor) -> tuple[tl.dtype, str]:
    """In what scores are computed: as keys are stored where q has 16 bits, else in f32, in three passes of TF32."""
    if INTERPRETED:
        return tl.float32, "ieee"
    if torch.float32 in (q.dtype, k.dtype):
        return tl.float32, precise()
    if k.dtype == torch.bfloat16 or (k.dtype == torch.int8 and q.dtype == torch.bfloat16):
        return tl.bfloat16, "ieee"
    return tl.float16, "ieee"


def attention(o: Operands) -> None:
    """Two launches: sequences with one token, whose contexts are cut into parts, and the others, if there are any."""
    q, k, v = o["q"], o.state("k"), o.state("v")
    assert k is not None
    heads, kv_heads, block_size = o.attr("heads"), o.attr("kv_heads"), o.attr("block_size")
    latent, window, sinks, scales = v is None, o.attr("window"), o.vector("sinks"), o.state("k_scale")
    key_width = o.attr("head_dim")
    value_width = o.attr("v_head_dim") or key_width
    offsets, starts, table = o["query_offsets"], o["seq_starts"], o["page_table"]
    sequences, width = table.shape
    y = o.result(0, len(q), heads * value_width)
    splits = max(1, -(-width * block_size // SPLIT))
    parts = (
        [o.new(sequences, heads, splits, value_width), *(o.new(sequences, heads, splits) for _ in range(2))]
        if splits > 1
        else [q, q, q]
    )
    dot, precision = _dot_type(q, k)
    group = heads // kv_heads
    none = q  # in the place of what a call does not have
    arrays = (
        q, k, k if v is None else v, none if scales is None else scales,
        none if scales is None or latent else o.state("v_scale"), none if sinks is None else sinks,
        starts, offsets, table, y, *parts,
    )  # fmt: skip
    sizes = (sequences, width, kv_heads, key_width, value_width, o.attr("scale"), o.attr("softcap"), window, splits)
    meta = {
        "LATENT": latent, "SCALED": scales is not None, "CAPPED": o.attr("softcap") != 0, "WINDOWED": window > 0,
        "SINKS": sinks is not None, "DOT": dot, "PRECISION": precision, "BLOCK_SIZE": block_size, "SPLIT": SPLIT,
        "GROUP": group, "WIDTH": power_of_two(value_width, 16),
        "REST": power_of_two(key_width - value_width, 16),
    }  # fmt: skip
    few, many = of_attention(group, value_width, dot.primitive_bitwidth // 8)
    launch(
        kernels.attend, (sequences, kv_heads * few.chunks, splits), *arrays, *sizes, **meta, **few.meta(), DECODE=True,
        WHOLE=splits == 1,
    )  # fmt: skip
    if splits > 1:
        launch(
            kernels.merge, (sequences, heads), *parts, none if sinks is None else sinks, starts, offsets, y, heads,
            value_width, window, splits, WINDOWED=window > 0, SINKS=sinks is not None, SPLIT=SPLIT,
            WIDTH=power_of_two(value_width, 16),
        )  # fmt: skip
    if len(q) > sequences:
        launch(
            kernels.attend, (len(q) // many.tokens + sequences, kv_heads * many.chunks, 1), *arrays, *sizes, **meta,
            **many.meta(), DECODE=False, WHOLE=True,
        )  # fmt: skip
