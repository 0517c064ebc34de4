"""Qwen 3: Llama's shape with an RMS norm on each head of q and k before the rotary embedding."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama, qwen2
from .decoder import DecoderConfig, attention_block, mlp_block, output_head
from .weights import Weights

HF_DEFAULTS = {
    "qwen3": qwen2.DEFAULTS,
    "qwen3_vl_text": {"max_position_embeddings": 128000, "rope_theta": 500000.0, "head_dim": 128},
}
HF_NAMES = {
    **llama.HF_NAMES,
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = b.rms_norm(x, w(f"blk.{i}.attn_norm.weight"), c.eps)
        x = b.add(x, attention_block(b, c, w, i, h, qk_norm="head"))
        h = b.rms_norm(x, w(f"blk.{i}.ffn_norm.weight"), c.eps)
        x = b.add(x, mlp_block(b, c, w, i, h))
    return output_head(b, c, w, x)
