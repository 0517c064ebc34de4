"""Qwen 3: Llama's shape with an RMS norm on each head of q and k before the rotary embedding."""

from __future__ import annotations

from functools import partial

from ..program.build import Builder, Program
from . import llama, qwen2
from .decoder import DecoderConfig, attention_block, mlp_block, pre_norm_layers
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
    return pre_norm_layers(b, c, w, partial(attention_block, qk_norm="head"), mlp_block)
