"""Phi 3 and 4 (arXiv 2404.14219): Llama's shape with fused projections, LongRoPE, and a sliding window in some sizes."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, fused_attention_block, fused_mlp_block, output_head
from .weights import Weights

HF_DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "attn_" not in name and "ffn_" not in name},
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_qkv.weight": "model.layers.{i}.self_attn.qkv_proj.weight",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.gate_up_proj.weight",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = b.rms_norm(x, w(f"blk.{i}.attn_norm.weight"), c.eps)
        x = b.add(x, fused_attention_block(b, c, w, i, h))
        h = b.rms_norm(x, w(f"blk.{i}.ffn_norm.weight"), c.eps)
        x = b.add(x, fused_mlp_block(b, c, w, i, h))
    return output_head(b, c, w, x)
