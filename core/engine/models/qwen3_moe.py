"""Qwen 3 with experts: a layer with a router has experts, one without is Qwen 3's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..backend.v1 import Value
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import qwen2, qwen3
from .decoder import DecoderConfig, attention_block, mlp_block, moe_block, pre_norm_layers
from .weights import Names, Weights

_SEES = "qwen3_vl_moe_text"
HF_DEFAULTS = {
    "qwen3_moe": {**qwen2.DEFAULTS, "num_experts_per_tok": 8},
    _SEES: {
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
    },
}
HF_NAMES: Names = {
    **qwen3.HF_NAMES,
    "blk.{i}.ffn_gate_inp.weight": "model.layers.{i}.mlp.gate.weight",
    "blk.{i}.ffn_gate_exps.weight": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    "blk.{i}.ffn_up_exps.weight": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    "blk.{i}.ffn_gate_up_exps.weight": "model.layers.{i}.mlp.experts.gate_up_proj",
    "blk.{i}.ffn_down_exps.weight": (
        "model.layers.{i}.mlp.experts.down_proj",
        "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
    ),
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """GGUF files have no key for it: their experts' weights always sum to 1, as those of the model that sees."""
    always = checkpoint.kind == "gguf" or checkpoint.architecture == _SEES
    return replace(c, renormalize=always or bool(checkpoint.metadata.get("norm_topk_prob", False)))


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, partial(attention_block, qk_norm="head"), _feed_forward)


def _feed_forward(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    sparse = w.maybe(f"blk.{i}.ffn_gate_inp.weight") is not None
    return moe_block(b, c, w, i, h) if sparse else mlp_block(b, c, w, i, h)
