"""Qwen 2 and 2.5, and the language models of those that see: Llama's shape with biases on q, k and v."""

from __future__ import annotations

from .llama import HF_NAMES, build

__all__ = ["DEFAULTS", "HF_DEFAULTS", "HF_NAMES", "build"]

# What transformers takes where a file leaves it out (Qwen2Config, Qwen2VLTextConfig, Qwen2_5_VLTextConfig).
DEFAULTS = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_SEES = {**DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "max_window_layers": 80}
HF_DEFAULTS = {"qwen2": DEFAULTS, "qwen2_vl_text": _SEES, "qwen2_5_vl_text": _SEES}
