"""Helium (Kyutai): Llama's shape, whose files pair neighbouring rotary dimensions."""

from __future__ import annotations

from .glm4 import configure
from .llama import HF_NAMES, build

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 100000.0,
    "tie_word_embeddings": False,
}
