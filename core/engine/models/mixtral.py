"""Mixtral: Llama's attention with top-k routed experts in place of the feed-forward."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, moe_block, pre_norm_layers
from .weights import Weights

HF_DEFAULTS = {"max_position_embeddings": 131072, "num_experts_per_tok": 2, "rope_theta": 1000000.0}
HF_NAMES = {
    **llama.HF_NAMES,
    "blk.{i}.ffn_gate_inp.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
    "blk.{i}.ffn_gate_exps.weight": "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    "blk.{i}.ffn_up_exps.weight": "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    "blk.{i}.ffn_down_exps.weight": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, attention_block, moe_block)
