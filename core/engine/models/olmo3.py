"""OLMo 3: OLMo 2 with a window on three of four layers, whose rotary embedding is not scaled."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from .decoder import DecoderConfig
from .fields import positive
from .olmo2 import HF_NAMES, build
from .rope import Rope, base_frequencies, rope_of_kinds

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {"sliding_window": 4096, "rope_theta": 500000.0}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data = checkpoint.metadata
    if checkpoint.kind == "hf" and data.get("rope_parameters") is not None:
        local, full = rope_of_kinds(data, c.head_dim, c.max_context)
        return replace(c, rope=full, local_rope=local)
    key = "rope_theta" if checkpoint.kind == "hf" else f"{checkpoint.architecture}.rope.freq_base"
    theta = positive(data, key, HF_DEFAULTS["rope_theta"] if checkpoint.kind == "hf" else 10000.0)
    return replace(c, local_rope=Rope(base_frequencies(c.head_dim, theta), interleaved=False))
