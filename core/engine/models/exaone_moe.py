"""K-EXAONE: EXAONE 4's attention between norms before each part, and DeepSeek V3's experts after first layers without."""

from __future__ import annotations

from functools import partial

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import exaone4, qwen3
from .decoder import DecoderConfig, attention_block, pre_norm_layers
from .experts import HF_EXPERTS, ExpertsConfig, feed_forward, gguf_experts, hf_experts
from .experts import unused as after_the_last
from .weights import Weights

HF_DEFAULTS = {
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
HF_NAMES = {
    **qwen3.HF_NAMES,
    **HF_EXPERTS,
    "blk.{i}.exp_probs_b.bias": "model.layers.{i}.mlp.e_score_correction_bias",
}


def unused(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Layers of multi-token prediction."""
    return after_the_last(c, checkpoint) if checkpoint.kind == "gguf" else ("mtp.",)


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> ExpertsConfig:
    c = exaone4.configure(c, checkpoint)
    if checkpoint.kind == "gguf":
        return gguf_experts(c, checkpoint)
    return hf_experts(c, checkpoint, shared="num_shared_experts")


def build(b: Builder, c: ExpertsConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, partial(attention_block, qk_norm="head"), feed_forward)
