"""Seed-OSS: Llama's shape with biases on q, k and v; GGUF files name the feed-forward's norm after what lies before it."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, mlp_block, output_head
from .weights import Weights

HF_DEFAULTS = {"max_position_embeddings": 524288, "head_dim": 128}
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "ffn_norm" not in name},
    "blk.{i}.post_attention_norm.weight": llama.HF_NAMES["blk.{i}.ffn_norm.weight"],
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = b.rms_norm(x, w(f"blk.{i}.attn_norm.weight"), c.eps)
        x = b.add(x, attention_block(b, c, w, i, h))
        h = b.rms_norm(x, w(f"blk.{i}.post_attention_norm.weight"), c.eps)
        x = b.add(x, mlp_block(b, c, w, i, h))
    return output_head(b, c, w, x)
