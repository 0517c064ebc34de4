"""The KV cache: writing, copying, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton.language as tl

from ..kernels import attention as kernels
from ..kernels import cache, position
from ..kernels.common import INTERPRETED, launch, power_of_two
from ..operands import Operands
from ..tiles import has_fp8, of_attention, precise

ELEMENTS = 1024
BYTES = (torch.int8, torch.uint8)
"""A cache of int8 with scales, and one of fp8."""
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
    """In what scores are computed: as keys are stored where q has 16 bits, else in f32, in three passes of TF32.
    Bytes are taken as what q has."""
    if INTERPRETED:
        return tl.float32, "ieee"
    if torch.float32 in (q.dtype, k.dtype):
        return tl.float32, precise()
    if k.dtype == torch.bfloat16 or (k.dtype in BYTES and q.dtype == torch.bfloat16):
        return tl.bfloat16, "ieee"
    return tl.float16, "ieee"


@dataclass(frozen=True)
class Attention:
    """An attention call in one step. ``parts``: memory for what ``splits`` parts of each context sum up to, if there are
    several: values [sequences, heads, splits, width], and the greatest score and the total [sequences, heads, splits]."""

    o: Operands
    y: torch.Tensor
    splits: int
    parts: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, o: Operands) -> Attention:
        heads, width = o.attr("heads"), o.attr("v_head_dim") or o.attr("head_dim")
        q, (sequences, blocks) = o["q"], o["page_table"].shape
        splits = max(1, -(-blocks * o.attr("block_size") // SPLIT))
        parts: tuple[torch.Tensor, ...] = (q, q, q)
        if splits > 1:
            parts = (o.new(sequences, heads, splits, width), *(o.new(sequences, heads, splits) for _ in range(2)))
        return cls(o, o.result(0, len(q), heads * width), splits, parts)

    @property
    def several(self) -> bool:
        """Whether a sequence may have more than one token."""
        return len(self.o["q"]) != len(self.o["page_table"])

    @property
    def lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.o["seq_starts"], self.o["query_offsets"], self.o["page_table"]

    def launch(self, decode: bool) -> None:
        """Sequences with one token, or the others."""
        o, q, k, v = self.o, self.o["q"], self.o.state("k"), self.o.state("v")
        assert k is not None
        heads, kv_heads, key_width = o.attr("heads"), o.attr("kv_heads"), o.attr("head_dim")
        latent, window, sinks, scales = v is None, o.attr("window"), o.vector("sinks"), o.state("k_scale")
        value_width = o.attr("v_head_dim") or key_width
        starts, offsets, table = self.lists
        sequences, width = table.shape
        dot, precision = _dot_type(q, k)
        group = heads // kv_heads
        none = q  # in the place of what a call does not have
        few, many = of_attention(group, value_width, dot.primitive_bitwidth // 8, scales is not None)
        tiles = few if decode else many
        blocks = sequences if decode else len(q) // many.tokens + sequences
        launch(
            kernels.attend, (blocks, kv_heads * tiles.chunks, self.splits if decode else 1),
            q, k, k if v is None else v, none if scales is None else scales,
            none if scales is None or latent else o.state("v_scale"), none if sinks is None else sinks,
            starts, offsets, table, self.y, *self.parts,
            sequences, width, kv_heads, key_width, value_width, o.attr("scale"), o.attr("softcap"), window, self.splits,
            LATENT=latent, SCALED=scales is not None, CAPPED=o.attr("softcap") != 0, WINDOWED=window > 0,
            SINKS=sinks is not None, DOT=dot, PRECISION=precision, NATIVE=has_fp8(), BLOCK_SIZE=o.attr("block_size"),
            SPLIT=SPLIT, GROUP=group, WIDTH=power_of_two(value_width, 16), REST=power_of_two(key_width - value_width, 16),
            **tiles.meta(), DECODE=decode, WHOLE=not decode or self.splits == 1,
        )  # fmt: skip

    def merge(self) -> None:
        window, sinks = self.o.attr("window"), self.o.vector("sinks")
        starts, offsets, table = self.lists
        heads, width = self.parts[0].shape[1], self.parts[0].shape[3]
        launch(
            kernels.merge, (len(table), heads), *self.parts, self.y if sinks is None else sinks, starts, offsets, self.y,
            heads, width, window, self.splits, WINDOWED=window > 0, SINKS=sinks is not None, SPLIT=SPLIT,
            WIDTH=power_of_two(width, 16),
        )  # fmt: skip


def decode_attention(step: Attention) -> None:
    """Sequences with one token, whose contexts are cut into parts."""
    step.launch(decode=True)
    if step.splits > 1:
        step.merge()


def attention(o: Operands, decode: Callable[[Attention], None] = decode_attention) -> None:
    """Sequences with one token, and the others if there are any."""
    step = Attention.of(o)
    if not (step.several and len(o["page_table"]) == 1):
        decode(step)
    if step.several:
        step.launch(decode=False)
