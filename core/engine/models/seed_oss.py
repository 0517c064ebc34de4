"""Seed-OSS: Llama's shape with biases on q, k and v; GGUF files name the feed-forward's norm after what lies before it."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, mlp_block, pre_norm_layers
from .weights import Weights

HF_DEFAULTS = {"max_position_embeddings": 524288, "head_dim": 128}
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "ffn_norm" not in name},
    "blk.{i}.post_attention_norm.weight": llama.HF_NAMES["blk.{i}.ffn_norm.weight"],
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, attention_block, mlp_block, "post_attention_norm")
