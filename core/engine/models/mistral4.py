"""Mistral Small 4: DeepSeek's latent attention and experts, which shares choose, and queries that grow as Ministral 3's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..formats import Checkpoint
from . import deepseek
from .decoder import DecoderConfig
from .deepseek import HF_KEYS, HF_NAMES, DeepseekConfig, build
from .experts import routing
from .fields import integer, positive
from .rope import rope_scaling

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure", "flattened"]

HF_DEFAULTS = {
    "max_position_embeddings": 1048576,
    "num_experts_per_tok": 4,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def flattened(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """config.json's share of rotary dimensions is one of the whole head; the dimensions that it has are named beside it."""
    data = checkpoint.metadata
    if checkpoint.kind == "gguf":
        return data
    return {**data, "rope_parameters": {**rope_scaling(data), "partial_rotary_factor": 1.0}, "rope_scaling": None}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DeepseekConfig:
    found, data = deepseek.configure(c, checkpoint), checkpoint.metadata
    if checkpoint.kind == "gguf":
        return found
    groups, kept = (integer(data, key, 1) for key in ("n_group", "topk_group"))
    scale = positive(data, "routed_scaling_factor", 1.0)
    return replace(found, routing=routing(c, "softmax", scale, groups, kept, best=2))
