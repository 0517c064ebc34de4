"""gpt-oss (arXiv 2508.10925): attention with sinks and a window on every other layer, biases throughout, and experts with a
clamped SwiGLU, whose weights are in MXFP4.

Its YaRN ramp does not end at whole pairs, as config.json says and GGUF files have no key for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..backend.v1 import Value, WeightRef
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.experts import Experts, expert_rows, turned_experts
from ..program.weights import ConstantWeight
from . import llama
from .decoder import DecoderConfig, attention_block, pre_norm_layers, router
from .fields import positive
from .rope import rope_from_gguf
from .weights import Weights

_EXPERTS = "model.layers.{i}.mlp.experts."
HF_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "ffn_" not in name},
    "blk.{i}.attn_sinks.weight": "model.layers.{i}.self_attn.sinks",
    "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate_inp.weight": "model.layers.{i}.mlp.router.weight",
    "blk.{i}.ffn_gate_inp.bias": "model.layers.{i}.mlp.router.bias",
    **{
        f"blk.{{i}}.{name}.{kind}": (f"{_EXPERTS}{own}{ending}", f"{_EXPERTS}{own}.{kind}")  # the latter are mlx-lm's
        for name, own in (
            ("ffn_gate_up_exps", "gate_up_proj"),
            ("ffn_gate_exps", "gate_proj"),
            ("ffn_up_exps", "up_proj"),
            ("ffn_down_exps", "down_proj"),
        )
        for kind, ending in (("weight", ""), ("bias", "_bias"))
    },
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data, arch = checkpoint.metadata, checkpoint.architecture
    if checkpoint.kind == "gguf":
        rope = rope_from_gguf(data, arch, c.head_dim, None, interleaved=False, truncate=False)
        return replace(c, rope=rope)
    alpha, limit = positive(data, "swiglu_alpha", c.swiglu_alpha), positive(data, "swiglu_limit", c.swiglu_limit)
    return replace(c, swiglu_alpha=alpha, swiglu_limit=limit)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, _attention, _moe, "post_attention_norm")


def _attention(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    return attention_block(b, c, w, i, h, sinks=w(f"blk.{i}.attn_sinks.weight"))


def _moe(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    p = f"blk.{i}."
    matrices = {part: _expert_weight(w, i, part) for part in ("gate", "up", "down")}
    biases = {f"{part}_bias": _expert_bias(w, i, part) for part in ("gate", "up", "down")}
    act = {"kind": "clamped_swiglu", "alpha": c.swiglu_alpha, "limit": c.swiglu_limit}
    experts = Experts(**matrices, **biases, act=act)
    return b.moe(h, router(c, w, i), w(p + "ffn_gate_inp.bias"), experts, c.experts_used)


# Hugging Face files keep the gate's rows and those of up in turn, in one tensor.
_IN_TURN = {
    "gate": ("gate_up", slice(0, None, 2)),
    "up": ("gate_up", slice(1, None, 2)),
    "down": ("down", slice(None)),
}


def _apart(w: Weights, i: int) -> bool:
    """Whether gate and up have a tensor each, as in GGUF files and those of mlx-lm."""
    return w.maybe(f"blk.{i}.ffn_gate_exps.weight") is not None


def _expert_weight(w: Weights, i: int, part: str) -> WeightRef:
    """Plain numbers lie transposed in Hugging Face files, those in MXFP4 do not."""
    name = f"blk.{i}.ffn_{part}_exps.weight"
    if _apart(w, i):
        return w(name)
    both, rows = _IN_TURN[part]
    stored = w(f"blk.{i}.ffn_{both}_exps.weight")
    return (expert_rows if stored.format == "MXFP4" else turned_experts)(name, stored, rows)


def _expert_bias(w: Weights, i: int, part: str) -> WeightRef:
    name = f"blk.{i}.ffn_{part}_exps.bias"
    if _apart(w, i):
        return w(name)
    both, rows = _IN_TURN[part]
    stored = w(f"blk.{i}.ffn_{both}_exps.bias")
    return ConstantWeight(name, np.ascontiguousarray(stored.dense()[..., rows]))
