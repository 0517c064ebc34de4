"""Phi 3 and 4 (arXiv 2404.14219): Llama's shape with fused projections, LongRoPE, and a sliding window in some sizes."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, fused_attention_block, fused_mlp_block, pre_norm_layers
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
    return pre_norm_layers(b, c, w, fused_attention_block, fused_mlp_block)
