"""OLMoE (arXiv 2409.02060): Llama's shape with norms of all of q and k, and routed experts, whose weights are shares of all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..formats import Checkpoint
from ..program.build import Builder, Program
from .decoder import DecoderConfig, attention_block, moe_block, pre_norm_layers
from .fields import flag
from .qwen3_moe import HF_NAMES
from .weights import Weights

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """GGUF files have no key for it: their experts' weights are shares of all experts."""
    return replace(c, renormalize=checkpoint.kind == "hf" and flag(checkpoint.metadata, "norm_topk_prob", False))


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, partial(attention_block, qk_norm="row"), moe_block)
