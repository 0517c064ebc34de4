"""Hunyuan's dense models (Tencent): Llama's shape with norms of each head of q and k behind the rotary embedding."""

from __future__ import annotations

from ..backend.v1 import Value
from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, QKNorm, attention_block, mlp_block, pre_norm_layers
from .weights import Weights

HF_DEFAULTS = {"tie_word_embeddings": False}
HF_NAMES = {
    **llama.HF_NAMES,
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.query_layernorm.weight",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.key_layernorm.weight",
}


def attention(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    kind: QKNorm = "none" if w.maybe(f"blk.{i}.attn_q_norm.weight") is None else "rotated head"
    return attention_block(b, c, w, i, h, kind)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, attention, mlp_block)
