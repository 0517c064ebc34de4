"""ERNIE 4.5 with experts: ERNIE 4.5's attention, experts chosen by their share and a correction, and experts that all tokens
share."""

from __future__ import annotations

from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import ernie4_5, llama
from .decoder import DecoderConfig, attention_block, pre_norm_layers
from .experts import HF_EXPERTS, ExpertsConfig, feed_forward, routing, shared_width
from .fields import integer
from .weights import Weights

HF_KEYS = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
HF_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_key_value_heads": 4,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
}
HF_NAMES = {
    **llama.HF_NAMES,
    **HF_EXPERTS,
    "blk.{i}.exp_probs_b.bias": "model.layers.{i}.mlp.moe_statics.e_score_correction_bias",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> ExpertsConfig:
    c, data, arch = ernie4_5.configure(c, checkpoint), checkpoint.metadata, checkpoint.architecture
    if checkpoint.kind == "gguf":
        step, end, first = f"{arch}.interleave_moe_layer_step", "", f"{arch}.leading_dense_block_count"
        shared = shared_width(data, f"{arch}.expert_shared_count", f"{arch}.expert_feed_forward_length")
    else:
        step, end, first = "moe_layer_interval", "moe_layer_end_index", "moe_layer_start_index"
        shared = shared_width(data, "moe_num_shared_experts", "moe_intermediate_size")
    if integer(data, step, 1) != 1 or integer(data, end, -1, low=-1) not in (-1, c.layers - 1):
        raise ModelError("Each layer after the first dense ones must have experts, as in ERNIE 4.5's own models.")
    dense = integer(data, first, 0, low=0)
    return ExpertsConfig(**vars(c), dense=dense, shared=shared, routing=routing(c, "softmax", 1.0))


def build(b: Builder, c: ExpertsConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, attention_block, feed_forward)
