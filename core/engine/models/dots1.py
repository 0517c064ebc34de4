"""dots.llm1 (arXiv 2506.05767): Qwen 3's attention, and DeepSeek V3's experts after first layers without."""

from __future__ import annotations

from functools import partial

from ..program.build import Builder, Program
from . import qwen3
from .decoder import attention_block, pre_norm_layers
from .experts import HF_EXPERTS, ExpertsConfig, feed_forward
from .glm4_moe import HF_KEYS, configure
from .weights import Weights

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {"max_position_embeddings": 2048, "first_k_dense_replace": 0, "norm_topk_prob": False}
HF_NAMES = {**qwen3.HF_NAMES, **HF_EXPERTS}


def build(b: Builder, c: ExpertsConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, partial(attention_block, qk_norm="head"), feed_forward)
