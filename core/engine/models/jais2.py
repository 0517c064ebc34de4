"""Jais 2 (Inception): layer norms, biases throughout, and a feed-forward of squared ReLU and no gate."""

from __future__ import annotations

from .nemotron import HF_NAMES
from .starcoder2 import build

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build"]

HF_KEYS = {"rms_norm_eps": "layer_norm_eps"}
HF_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": False}
