"""Gemma 2 (arXiv 2408.00118): norms on both sides of attention and feed-forward, capped scores and logits, and a window on
every other layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, mlp_block, output_head
from .fields import positive
from .weights import Weights

HF_KEYS = {"hidden_act": "hidden_activation"}
HF_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
HF_NAMES = {
    **llama.HF_NAMES,
    "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_UNSAID = {"attn": 50.0, "final": 30.0}
"""The caps of GGUF files from before there were keys for them."""
LARGEST = 46
"""Layers of the size whose scores are scaled by the width of the residual a head."""


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    c = with_scales(c, checkpoint, LARGEST)
    attention, final = (softcap(checkpoint, where, _UNSAID[where]) for where in ("attn", "final"))
    return replace(c, attention_softcap=attention, logit_softcap=final)


def softcap(checkpoint: Checkpoint, where: str, unsaid: float = 0.0) -> float:
    """Of the scores ("attn") or of the logits ("final"); 0 for none, as config.json's null says. ``unsaid``: where a GGUF has
    no key."""
    key = f"{where}_logit_softcapping"
    if checkpoint.kind == "gguf":
        key = f"{checkpoint.architecture}.{key}"
    else:
        unsaid = 0.0
    return positive(checkpoint.metadata, key) if checkpoint.metadata.get(key) is not None else unsaid


def with_scales(c: DecoderConfig, checkpoint: Checkpoint, largest: int) -> DecoderConfig:
    """What all Gemmas have: embeddings scaled by the root of the width, norm weights kept less 1 (GGUF files have it added
    already), and a scale of scores that most GGUF files do not name: the model of ``largest`` layers has another."""
    hf, data = checkpoint.kind == "hf", checkpoint.metadata
    if hf:
        scale = positive(data, "query_pre_attn_scalar", float(c.head_dim)) ** -0.5
    else:
        scale = (c.hidden / c.heads if c.layers == largest else c.head_dim) ** -0.5
        scale = positive(data, f"{checkpoint.architecture}.attention.scale", scale)
    return replace(c, embedding_scale=c.hidden**0.5, norm_offset=1.0 if hf else 0.0, attention_scale=scale)


def layers(b: Builder, c: DecoderConfig, w: Weights, qk_norm: Literal["none", "head"]) -> Program:
    """The decoder of Gemma 2 and 3, which differ in their norms of q and k."""
    x = b.embed(w("token_embd.weight"), scale=c.embedding_scale)
    for i in b.layers(c.layers):
        p = f"blk.{i}."
        h = b.rms_norm(x, w(p + "attn_norm.weight"), c.eps, weight_offset=c.norm_offset)
        h = attention_block(b, c, w, i, h, qk_norm)
        x = b.add(x, b.rms_norm(h, w(p + "post_attention_norm.weight"), c.eps, weight_offset=c.norm_offset))
        h = b.rms_norm(x, w(p + "ffn_norm.weight"), c.eps, weight_offset=c.norm_offset)
        h = mlp_block(b, c, w, i, h)
        x = b.add(x, b.rms_norm(h, w(p + "post_ffw_norm.weight"), c.eps, weight_offset=c.norm_offset))
    return output_head(b, c, w, x)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return layers(b, c, w, qk_norm="none")
