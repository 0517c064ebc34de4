"""Gemma (arXiv 2403.08295): Llama's shape with scaled embeddings, GELU, and norm weights that Hugging Face files keep less 1."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from .decoder import DecoderConfig
from .llama import HF_NAMES, build

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure"]

HF_KEYS = {"hidden_act": "hidden_activation"}
HF_DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """The first files say gelu and mean its tanh form."""
    offset = 1.0 if checkpoint.kind == "hf" else 0.0
    return replace(c, act="gelu_tanh", embedding_scale=c.hidden**0.5, norm_offset=offset)
