"""FlexOlmo (arXiv 2507.07024): OLMo 2's layers with OLMoE's experts."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import olmo2, qwen3_moe
from .decoder import DecoderConfig, moe_block
from .olmoe import configure
from .weights import Weights

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "num_experts": 7,
    "num_experts_per_tok": 5,
    "tie_word_embeddings": False,
}
HF_NAMES = {
    **{name: own for name, own in olmo2.HF_NAMES.items() if ".ffn_" not in name},
    **{name: own for name, own in qwen3_moe.HF_NAMES.items() if "_exps" in name or "_inp" in name},
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return olmo2.layers(b, c, w, "row", moe_block)
