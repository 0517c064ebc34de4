"""EXAONE 4 (arXiv 2507.11407): norms after attention and feed-forward, norms of each head of q and k, and, in the large size, a
window on three of four layers; the others then see everything and have no positions."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import olmo2
from .decoder import DecoderConfig
from .olmo2 import HF_NAMES
from .weights import Weights

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {"sliding_window": 4096}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return replace(c, rope=None, local_rope=c.rope) if c.windows else c


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return olmo2.layers(b, c, w, qk_norm="head")
