"""MiniMax M2: norms of all of q and of k, rotary embedding on a part of each head, and experts in all layers, chosen by sigmoids
and a correction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import mixtral, qwen3
from .decoder import DecoderConfig, attention_block, pre_norm_layers
from .experts import ExpertsConfig, feed_forward, gguf_routing, routing
from .weights import Weights

HF_DEFAULTS = {
    "max_position_embeddings": 196608,
    "rope_theta": 5000000.0,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
HF_NAMES = {
    **{name: own for name, own in qwen3.HF_NAMES.items() if "ffn_" not in name or "norm" in name},
    **{name: own for name, own in mixtral.HF_NAMES.items() if "_exps" in name or "_inp" in name},
    "blk.{i}.exp_probs_b.bias": "model.layers.{i}.block_sparse_moe.e_score_correction_bias",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> ExpertsConfig:
    found = gguf_routing(c, checkpoint) if checkpoint.kind == "gguf" else routing(c, "sigmoid", 1.0)
    return ExpertsConfig(**vars(replace(c, renormalize=True)), dense=0, shared=0, routing=found)


def build(b: Builder, c: ExpertsConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, partial(attention_block, qk_norm="row"), feed_forward)
