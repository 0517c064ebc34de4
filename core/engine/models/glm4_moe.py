"""GLM 4.5 and 4.6 (arXiv 2508.06471): rotary embedding on half of each head, norms of q and k in some sizes, and DeepSeek V3's
experts after first layers without."""

from __future__ import annotations

from ..backend.v1 import Value
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import qwen3
from .decoder import DecoderConfig, QKNorm, attention_block, pre_norm_layers
from .experts import HF_EXPERTS, ExpertsConfig, feed_forward, gguf_experts, hf_experts, unused
from .weights import Weights

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure", "unused"]

HF_KEYS = {"num_experts": "n_routed_experts"}
HF_DEFAULTS = {
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
HF_NAMES = {
    **{name: own for name, own in qwen3.HF_NAMES.items() if "ffn_norm" not in name},
    "blk.{i}.post_attention_norm.weight": qwen3.HF_NAMES["blk.{i}.ffn_norm.weight"],
    **HF_EXPERTS,
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> ExpertsConfig:
    return gguf_experts(c, checkpoint) if checkpoint.kind == "gguf" else hf_experts(c, checkpoint)


def build(b: Builder, c: ExpertsConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, _attention, feed_forward, "post_attention_norm")


def _attention(b: Builder, c: ExpertsConfig, w: Weights, i: int, h: Value) -> Value:
    kind: QKNorm = "none" if w.maybe(f"blk.{i}.attn_q_norm.weight") is None else "head"
    return attention_block(b, c, w, i, h, kind)
