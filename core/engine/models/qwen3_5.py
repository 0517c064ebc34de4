"""Qwen 3.5, with and without experts: Qwen3-Next's layers with each projection in a matrix of its own."""

from __future__ import annotations

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import gated_delta
from .decoder import DecoderConfig
from .gated_delta import DeltaConfig, configured, layers, separate, unused
from .weights import Weights

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure", "unused"]

# By architecture.
HF_DEFAULTS = {
    "qwen3_5_text": dict(gated_delta.DEFAULTS),
    "qwen3_5_moe_text": {**gated_delta.DEFAULTS, "num_experts_per_tok": 8, "num_experts": 256},
}
HF_NAMES = {
    **gated_delta.HF_NAMES,
    **{
        f"blk.{{i}}.{own}.weight": f"model.layers.{{i}}.linear_attn.in_proj_{name}.weight"
        for own, name in (("attn_qkv", "qkv"), ("attn_gate", "z"), ("ssm_alpha", "a"), ("ssm_beta", "b"))
    },
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DeltaConfig:
    return configured(c, checkpoint, tiled=True)


def build(b: Builder, c: DeltaConfig, w: Weights) -> Program:
    return layers(b, c, w, separate)
