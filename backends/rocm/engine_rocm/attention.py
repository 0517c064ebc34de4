"""Decode attention by the kernel in HIP; what it does not take, and longer sequences, by the kernels in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_cuda.arrays import DTYPES
from engine_cuda.operands import Operands
from engine_cuda.ops import cache

from . import sources
from .rtc import Runtime, launch

_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True)
class HipAttention:
    """The op's function."""

    runtime: Runtime

    def __call__(self, o: Operands) -> None:
        cache.attention(o, self._decode if takes(o) else cache.decode_attention)

    def _decode(self, step: cache.Attention) -> None:
        o, sinks, window = step.o, step.o.vector("sinks"), step.o.attr("window")
        q, k = o["q"], o.state("k")
        assert k is not None
        kv_heads, width = o.attr("kv_heads"), o.attr("head_dim")
        group = o.attr("heads") // kv_heads
        kv = "fp8" if k.dtype == torch.uint8 else _TAGS[k.dtype]
        options = sources.attention(width, group, o.attr("block_size"), _TAGS[q.dtype], kv)
        kernels = self.runtime.kernels("attention.hip", options)
        starts, offsets, table = step.lists
        sequences, table_width = table.shape
        launch(
            kernels, "attend_decode", (sequences, kv_heads * sources.chunks(options, group), step.splits), q, k, o.state("v"),
            o.state("k_scale"), o.state("v_scale"), sinks, starts, offsets, table, step.y, *step.parts, table_width,
            kv_heads, group, width, float(o.attr("scale")), float(o.attr("softcap")), window, step.splits,
        )  # fmt: skip
        if step.splits > 1:
            launch(
                kernels, "merge_parts", (sequences, o.attr("heads")), *step.parts, sinks, starts, offsets, step.y,
                o.attr("heads"), width, window, step.splits,
            )  # fmt: skip


def takes(o: Operands) -> bool:
    """Whether the kernel takes a call: no latent cache, heads of a width that it has, sinks in f32."""
    sinks = o.vector("sinks")
    known = sources.refusal(o.attr("head_dim")) is None and o.state("v") is not None
    return known and (sinks is None or sinks.dtype == torch.float32) and len(o["page_table"]) > 0
