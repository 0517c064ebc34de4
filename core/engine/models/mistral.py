"""Mistral: Llama's shape, where attention may be limited to a sliding window (arXiv 2310.06825)."""

from __future__ import annotations

from .llama import HF_NAMES, build

__all__ = ["HF_NAMES", "build"]
