"""Granite 3 and 4 (IBM) without experts: Llama's shape with factors on embeddings, scores, residuals and logits. Granite 4's
Hugging Face files call the feed-forward a shared one, and keep its gate and up in one matrix."""

from __future__ import annotations

from dataclasses import replace

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, fused_mlp_block, mlp_block, pre_norm_layers
from .fields import integer, positive
from .weights import Names, Weights

HF_NAMES: Names = {
    **llama.HF_NAMES,
    "blk.{i}.ffn_gate_up.weight": "model.layers.{i}.shared_mlp.input_linear.weight",
    "blk.{i}.ffn_down.weight": (
        llama.HF_NAMES["blk.{i}.ffn_down.weight"],
        "model.layers.{i}.shared_mlp.output_linear.weight",
    ),
}
_FACTORS = {
    "embedding": ("embedding_multiplier", "embedding_scale"),
    "residual": ("residual_multiplier", "residual_scale"),
    "logits": ("logits_scaling", "logit_scale"),
    "attention": ("attention_multiplier", "attention.scale"),
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    if checkpoint.architecture == "granitemoehybrid":
        c = _without_states(c, checkpoint)
    return with_factors(c, checkpoint)


def _without_states(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """ModelError for a model with state-space layers or experts, or one without positions."""
    data = checkpoint.metadata
    kinds, positions = data.get("layer_types"), data.get("position_embedding_type")
    attends = isinstance(kinds, list) and len(kinds) == c.layers and not set(kinds) - {"attention", "full_attention"}
    if not attends or c.experts or positions != "rope":
        raise ModelError(
            f"{checkpoint.path} has state-space layers, experts or no positions (layer_types, num_local_experts,"
            " position_embedding_type), which are not supported in Granite 4; its models without an h in their names have none."
        )
    return replace(c, mlp=integer(data, "shared_intermediate_size", 1024))


def with_factors(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """What all Granites have; the logits are divided by their factor. A GGUF file without a scale of scores has the usual one."""
    data, hf = checkpoint.metadata, checkpoint.kind == "hf"
    keys = {name: own[0] if hf else f"{checkpoint.architecture}.{own[1]}" for name, own in _FACTORS.items()}
    unsaid = {"attention": 1.0 if hf else c.head_dim**-0.5}
    found = {name: positive(data, key, unsaid.get(name, 1.0)) for name, key in keys.items()}
    return replace(
        c,
        embedding_scale=found["embedding"],
        residual_scale=found["residual"],
        logit_scale=1 / found["logits"],
        attention_scale=found["attention"],
    )


def rescaled(c: DecoderConfig) -> DecoderConfig:
    """The same model with its residual divided by what multiplies all that is added to it: only norms read the residual, and
    to them the factor is one of ``eps``."""
    return replace(
        c, embedding_scale=c.embedding_scale / c.residual_scale, eps=c.eps / c.residual_scale**2, residual_scale=1.0
    )


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, rescaled(c), w, attention_block, _feed_forward)


def _feed_forward(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    fused = w.maybe(f"blk.{i}.ffn_gate_up.weight") is not None
    return gate_up_block(b, c, w, i, h) if fused else mlp_block(b, c, w, i, h)


def gate_up_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value, which: str = "", width: int = 0) -> Value:
    """``mlp_block`` of a Hugging Face file."""
    parts = (f"ffn_gate_up{which}", f"ffn_gate{which}", f"ffn_up{which}", f"ffn_down{which}")
    return fused_mlp_block(b, c, w, i, h, parts, width)
