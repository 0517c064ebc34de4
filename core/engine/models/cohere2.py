"""Cohere's Command R7B and Command A (arXiv 2504.00698): Command R with a window on three of four layers; the others see
everything and have no positions."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from . import cohere
from .cohere import HF_KEYS, HF_NAMES, build
from .decoder import DecoderConfig

__all__ = ["HF_KEYS", "HF_NAMES", "build", "configure"]


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    c = cohere.configure(c, checkpoint)
    return replace(c, rope=None, local_rope=c.rope)
