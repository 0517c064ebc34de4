"""Qwen 2 and 2.5: Llama's shape with biases on q, k and v."""

from __future__ import annotations

from .llama import HF_NAMES, build

__all__ = ["HF_NAMES", "build"]
