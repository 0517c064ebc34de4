"""Mistral: Llama's shape, where attention may be limited to a sliding window (arXiv 2310.06825)."""

from __future__ import annotations

from .llama import HF_NAMES, build

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build"]

HF_DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096}
