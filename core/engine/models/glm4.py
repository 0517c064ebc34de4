"""GLM 4 of 2025, 9B and 32B: rotary embedding of neighbouring pairs on half of each head, biases on q, k and v, gate and up in
one matrix, and norms on both sides of attention and feed-forward."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, after, attention_block, fused_attention_block, fused_mlp_block, output_head
from .weights import Weights

HF_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "ffn_gate" not in name and "ffn_up" not in name},
    "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_self_attn_layernorm.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.gate_up_proj.weight",
    "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_mlp_layernorm.weight",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return replace(c, rope=None if c.rope is None else replace(c.rope, interleaved=True))


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = b.rms_norm(x, w(f"blk.{i}.attn_norm.weight"), c.eps)
        # GGUF files of the models of 2024 keep the rows of q, k and v in one matrix.
        fused = w.maybe(f"blk.{i}.attn_qkv.weight") is not None
        h = (fused_attention_block if fused else attention_block)(b, c, w, i, h)
        x = b.add(x, after(b, c, w, f"blk.{i}.post_attention_norm.weight", h))
        h = b.rms_norm(x, w(f"blk.{i}.ffn_norm.weight"), c.eps)
        x = b.add(x, after(b, c, w, f"blk.{i}.post_ffw_norm.weight", fused_mlp_block(b, c, w, i, h)))
    return output_head(b, c, w, x)
