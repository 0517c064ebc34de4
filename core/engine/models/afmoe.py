"""Arcee's Trinity (AFMoE): norms on both sides of attention and feed-forward, a gate on what attention gives, a window and
positions on three of four layers, neither on the others, and DeepSeek V3's experts after first layers without."""

from __future__ import annotations

from dataclasses import replace

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import qwen3
from .decoder import DecoderConfig, after, attention_block, pre_norm_layers
from .experts import HF_EXPERTS, ExpertsConfig, gguf_experts, routing, shared_width
from .experts import feed_forward as experts
from .fields import flag, integer, positive
from .weights import Weights

HF_KEYS = {"sliding_window_pattern": "global_attn_every_n_layers"}
HF_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "sliding_window": 1024,
    "tie_word_embeddings": False,
}
_LAYER = "model.layers.{i}."
HF_NAMES = {
    **qwen3.HF_NAMES,
    **HF_EXPERTS,
    "blk.{i}.attn_gate.weight": _LAYER + "self_attn.gate_proj.weight",
    "blk.{i}.post_attention_norm.weight": _LAYER + "post_attention_layernorm.weight",
    "blk.{i}.ffn_norm.weight": _LAYER + "pre_mlp_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": _LAYER + "post_mlp_layernorm.weight",
    "blk.{i}.ffn_gate_inp.weight": _LAYER + "mlp.router.gate.weight",
    "blk.{i}.exp_probs_b.bias": _LAYER + "mlp.expert_bias",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> ExpertsConfig:
    """GGUF files have no key for the scale of embeddings, which all published models have."""
    if not c.windows:
        raise ModelError("The configuration's sliding_window must be a number: layers with one have positions.")
    data, gguf = checkpoint.metadata, checkpoint.kind == "gguf"
    scaled = gguf or flag(data, "mup_enabled", False)
    c = replace(c, rope=None, local_rope=c.rope, embedding_scale=c.hidden**0.5 if scaled else 1.0)
    if gguf:
        return gguf_experts(c, checkpoint)
    return ExpertsConfig(
        **vars(replace(c, renormalize=flag(data, "route_norm", True))),
        dense=integer(data, "num_dense_layers", 1, low=0),
        shared=shared_width(data, "num_shared_experts", "moe_intermediate_size"),
        routing=routing(c, "sigmoid", positive(data, "route_scale", 1.0)),
    )


def build(b: Builder, c: ExpertsConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, _attention, _feed_forward)


def _attention(b: Builder, c: ExpertsConfig, w: Weights, i: int, h: Value) -> Value:
    gate = b.linear(h, w(f"blk.{i}.attn_gate.weight"), axes=("heads", "embed"))
    return after(b, c, w, f"blk.{i}.post_attention_norm.weight", attention_block(b, c, w, i, h, "head", gate=gate))


def _feed_forward(b: Builder, c: ExpertsConfig, w: Weights, i: int, h: Value) -> Value:
    return after(b, c, w, f"blk.{i}.post_ffw_norm.weight", experts(b, c, w, i, h))
