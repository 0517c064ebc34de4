"""Cohere's Command R7B and Command A (arXiv 2504.00698): Command R with a window on three of four layers; the others see
everything and have no positions."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from . import cohere
from .cohere import HF_KEYS, HF_NAMES, build
from .decoder import DecoderConfig

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {"max_position_embeddings": 8192, "sliding_window": 4096}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    c = cohere.configure(c, checkpoint)
    return replace(c, rope=None, local_rope=c.rope)
