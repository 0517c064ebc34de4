"""Qwen 2 and 2.5: Llama's shape with biases on q, k and v."""

from __future__ import annotations

from .llama import HF_NAMES, build

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build"]

# What transformers takes where a file leaves it out (Qwen2Config).
HF_DEFAULTS = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
