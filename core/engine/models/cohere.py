"""Cohere's Command R: one layer norm without bias for attention and feed-forward side by side, neighbouring rotary pairs,
scaled logits. Command R+ has layer norms of each head of q and k, each with a weight of its own."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, QKNorm, attention_block, logits, mlp_block
from .fields import positive
from .weights import Weights

HF_KEYS = {"rms_norm_eps": "layer_norm_eps"}
# transformers 4 took a base of 10000, but its files name theirs.
HF_DEFAULTS = {"max_position_embeddings": 8192, "rope_theta": 500000.0}
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "ffn_norm" not in name},
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    key = "logit_scale" if checkpoint.kind == "hf" else f"{checkpoint.architecture}.logit_scale"
    rope = None if c.rope is None else replace(c.rope, interleaved=True)
    return replace(c, logit_scale=positive(checkpoint.metadata, key, 0.0625), rope=rope)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = b.layer_norm(x, w(f"blk.{i}.attn_norm.weight"), None, c.eps)
        kind: QKNorm = "none" if w.maybe(f"blk.{i}.attn_q_norm.weight") is None else "each head"
        summed = b.add(x, attention_block(b, c, w, i, h, kind))
        x = b.add(summed, mlp_block(b, c, w, i, h))
    return logits(b, c, w, b.layer_norm(x, w("output_norm.weight"), None, c.eps))
