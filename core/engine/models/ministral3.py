"""Ministral 3: Llama's shape scaled by YaRN, with queries that grow with the logarithm of the original contexts before them."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from .decoder import DecoderConfig
from .fields import positive
from .llama import HF_NAMES, build
from .rope import query_growth, yarn_scale

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    if checkpoint.kind == "gguf":
        c = _without_temperature(c, checkpoint)
    growth, span = query_growth(checkpoint)
    return replace(c, query_growth=growth, query_span=span)


def _without_temperature(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """GGUF files name config.json's mscale_all_dim, by which YaRN's usual scale is divided."""
    data, prefix = checkpoint.metadata, f"{checkpoint.architecture}.rope.scaling"
    if c.rope is None or not data.get(f"{prefix}.yarn_log_multiplier"):
        return c
    divisor = yarn_scale(positive(data, f"{prefix}.factor", 1.0), positive(data, f"{prefix}.yarn_log_multiplier"))
    return replace(c, rope=replace(c.rope, scale=c.rope.scale / divisor))
