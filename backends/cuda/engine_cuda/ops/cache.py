"""The KV cache: writing, copying, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton.language as tl

from ..kernels import attention as kernels
from ..kernels import cache, position, words
from ..kernels.common import INTERPRETED, launch, power_of_two
from ..operands import Operands
from ..tiles import WORDS, has_fp8, of_attention, precise, together

ELEMENTS = 1024
BYTES = (torch.int8, torch.uint8)
"""A cache of int8 with scales, and one of fp8."""
FIRST = 256
SPLIT = 512
"""Cached tokens of one of the first parts of a sequence with one query, and of another: fixed sizes, so that a context is always
cut alike. All parts of words are as short as the first ones."""
FEW_QUERIES = 8
"""Of a group of heads that ``words.attend_words`` takes."""


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


def _parts(cached: int, split: int) -> int:
    """In how many parts so many tokens are cut."""
    short: int = kernels.SHORT.value * FIRST
    return max(1, -(-min(cached, short) // FIRST) - (-max(0, cached - short) // split))


def _by_words(o: Operands) -> bool:
    """Whether there is a kernel for the cache's words: of int8 or E4M3, in heads of a width that it has."""
    q, k, width = o["q"], o.state("k"), o.attr("head_dim")
    assert k is not None
    if o.state("v") is None or k.dtype not in BYTES or not (INTERPRETED or (together() and q.dtype != torch.float32)):
        return False
    known = INTERPRETED or k.dtype == torch.int8 or has_fp8()
    fits = width in (64, 128) and o.attr("v_head_dim") in (0, width) and o.attr("block_size") % words.PAGE.value == 0
    return bool(known and fits and o.attr("heads") // o.attr("kv_heads") <= FEW_QUERIES)


@dataclass(frozen=True)
class Attention:
    """An attention call in one step. ``parts``: memory for what ``splits`` parts of each context sum up to, if there are
    several: values [sequences, heads, splits, width], and the greatest score and the total [sequences, heads, splits].
    ``by_words``: whether sequences with one token have a kernel that decodes words of the cache in registers."""

    o: Operands
    y: torch.Tensor
    by_words: bool
    splits: int
    parts: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, o: Operands) -> Attention:
        heads, width = o.attr("heads"), o.attr("v_head_dim") or o.attr("head_dim")
        q, (sequences, blocks) = o["q"], o["page_table"].shape
        by_words = _by_words(o)
        splits = _parts(blocks * o.attr("block_size"), FIRST if by_words else SPLIT)
        parts: tuple[torch.Tensor, ...] = (q, q, q)
        if splits > 1:
            parts = (o.new(sequences, heads, splits, width), *(o.new(sequences, heads, splits) for _ in range(2)))
        return cls(o, o.result(0, len(q), heads * width), by_words, splits, parts)

    @property
    def split(self) -> int:
        """Tokens of a part but the first ones."""
        return FIRST if self.by_words else SPLIT

    @property
    def several(self) -> bool:
        """Whether a sequence may have more than one token."""
        return len(self.o["q"]) != len(self.o["page_table"])

    @property
    def lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.o["seq_starts"], self.o["query_offsets"], self.o["page_table"]

    def launch_words(self) -> None:
        """Sequences with one token."""
        o, none, sinks, scales = self.o, self.o["q"], self.o.vector("sinks"), self.o.state("k_scale")
        kv_heads, window, scaled = o.attr("kv_heads"), o.attr("window"), scales is not None
        starts, offsets, table = self.lists
        launch(
            words.attend_words, (len(table), kv_heads, self.splits),
            o["q"], o.state("k"), o.state("v"), scales if scaled else none, o.state("v_scale") if scaled else none,
            none if sinks is None else sinks, starts, offsets, table, self.y, *self.parts,
            table.shape[1], kv_heads, o.attr("scale"), o.attr("softcap"), window, self.splits,
            WHOLE=self.splits == 1, SCALED=scaled, CAPPED=o.attr("softcap") != 0, WINDOWED=window > 0,
            SINKS=sinks is not None, DOT=tl.float32 if INTERPRETED else tl.float16, TOGETHER=together(),
            KEYS_BY=words.of_word(scaled), VALUES_BY=words.of_two(scaled), BLOCK_SIZE=o.attr("block_size"), FIRST=FIRST,
            SPLIT=self.split, GROUP=o.attr("heads") // kv_heads, ROWS=FEW_QUERIES, WIDTH=o.attr("head_dim"), **WORDS,
        )  # fmt: skip

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
            FIRST=FIRST, SPLIT=self.split, GROUP=group, WIDTH=power_of_two(value_width, 16),
            REST=power_of_two(key_width - value_width, 16),
            **tiles.meta(), DECODE=decode, WHOLE=not decode or self.splits == 1,
            CAUSAL=decode or o.attr("causal"),  # a single token is the last of its context, so that nothing follows it
        )  # fmt: skip

    def merge(self) -> None:
        window, sinks = self.o.attr("window"), self.o.vector("sinks")
        starts, offsets, table = self.lists
        heads, width = self.parts[0].shape[1], self.parts[0].shape[3]
        launch(
            kernels.merge, (len(table), heads), *self.parts, self.y if sinks is None else sinks, starts, offsets, self.y,
            heads, width, window, self.splits, WINDOWED=window > 0, SINKS=sinks is not None, FIRST=FIRST,
            SPLIT=self.split, WIDTH=power_of_two(width, 16),
        )  # fmt: skip


def decode_attention(step: Attention) -> None:
    """Sequences with one token, whose contexts are cut into parts."""
    if step.by_words:
        step.launch_words()
    else:
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
