"""ERNIE 4.5, the dense sizes: Llama's shape with neighbouring rotary pairs in either format."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from .decoder import DecoderConfig
from .llama import HF_NAMES, build

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "head_dim": 128,
    "num_key_value_heads": 2,
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return replace(c, rope=None if c.rope is None else replace(c.rope, interleaved=True))
