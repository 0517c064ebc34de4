"""Mellum 2 (JetBrains): Qwen 3's attention and experts; layers with a window have a rotary embedding of their own."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from .decoder import DecoderConfig
from .fields import flag
from .qwen3_moe import HF_NAMES, build
from .rope import rope_of_kinds

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure", "unused"]

HF_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 8,
    "sliding_window": 1024,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data = checkpoint.metadata
    local, full = rope_of_kinds(data, c.head_dim, c.max_context)
    windows = c.windows if data.get("layer_types") is not None else (0,) * c.layers
    return replace(c, rope=full, local_rope=local, windows=windows, renormalize=flag(data, "norm_topk_prob", True))


def unused(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """A layer of multi-token prediction."""
    return ("mtp.",)
