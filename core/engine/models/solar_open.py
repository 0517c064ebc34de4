"""Solar Open: Llama's attention, and GLM 4.5's experts in all layers."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import attention_block, pre_norm_layers
from .experts import HF_EXPERTS, ExpertsConfig, feed_forward
from .glm4_moe import HF_KEYS, configure
from .weights import Weights

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1280,
    "first_k_dense_replace": 0,
    "tie_word_embeddings": False,
}
HF_NAMES = {**llama.HF_NAMES, **HF_EXPERTS}


def build(b: Builder, c: ExpertsConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, attention_block, feed_forward)
