"""VaultGemma (arXiv 2510.15001): Gemma 2 without the norms after attention and feed-forward."""

from __future__ import annotations

from . import gemma2
from .gemma2 import HF_DEFAULTS, HF_KEYS, configure
from .llama import build

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure"]

HF_NAMES = {name: own for name, own in gemma2.HF_NAMES.items() if ".post_" not in name}
