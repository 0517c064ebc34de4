"""Mistral: Llama's shape, where attention may be limited to a sliding window (arXiv 2310.06825); so is the Code World
Model's (arXiv 2510.02387), on three of four layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formats import Checkpoint
from .fields import integer
from .llama import HF_NAMES, build

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "flattened"]

_USUAL = {"max_position_embeddings": 131072, "sliding_window": 4096}
HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": _USUAL,
    "ministral": _USUAL,
    "cwm": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
_FULL_EVERY = 4


def flattened(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """A config.json of the Code World Model that does not tell its layers apart has one without a window before three with it."""
    data = checkpoint.metadata
    if checkpoint.architecture != "cwm" or data.get("layer_types") is not None:
        return data
    layers = range(integer(data, "num_hidden_layers", high=4096))
    return {**data, "layer_types": ["sliding_attention" if i % _FULL_EVERY else "full_attention" for i in layers]}
