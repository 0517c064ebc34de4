"""K-EXAONE: EXAONE 4's attention between norms before each part, and DeepSeek V3's experts after first layers without."""

from __future__ import annotations

from functools import partial

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import exaone4, qwen3
from .decoder import DecoderConfig, attention_block, pre_norm_layers
from .experts import (
    HF_EXPERTS,
    ExpertsConfig,
    dense_layers,
    feed_forward,
    gguf_experts,
    routing,
    shared_width,
)
from .experts import unused as after_the_last
from .fields import flag, integer, positive
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
    c, data = exaone4.configure(c, checkpoint), checkpoint.metadata
    if checkpoint.kind == "gguf":
        return gguf_experts(c, checkpoint)
    groups, kept = (integer(data, key, 1) for key in ("n_group", "topk_group"))
    return ExpertsConfig(
        **vars(c) | {"renormalize": flag(data, "norm_topk_prob", True)},
        dense=dense_layers(data),
        shared=shared_width(data, "num_shared_experts", "moe_intermediate_size"),
        routing=routing(c, "sigmoid", positive(data, "routed_scaling_factor", 1.0), groups, kept),
    )


def build(b: Builder, c: ExpertsConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, partial(attention_block, qk_norm="head"), feed_forward)
