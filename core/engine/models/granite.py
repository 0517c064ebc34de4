"""Granite 3 (IBM) without experts: Llama's shape with factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from ..backend.v1 import Value
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import llama
from .decoder import Config, DecoderConfig, attention_block, fused_mlp_block, mlp_block, pre_norm_layers
from .fields import positive
from .weights import Names, Weights

HF_NAMES: Names = llama.HF_NAMES
_FACTORS = {
    "embedding": ("embedding_multiplier", "embedding_scale"),
    "residual": ("residual_multiplier", "residual_scale"),
    "logits": ("logits_scaling", "logit_scale"),
    "attention": ("attention_multiplier", "attention.scale"),
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return with_factors(c, checkpoint)


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


def rescaled(c: Config) -> Config:
    """The same model with its residual divided by what multiplies all that is added to it: only norms read the residual, and
    to them the factor is one of ``eps``."""
    return replace(
        c, embedding_scale=c.embedding_scale / c.residual_scale, eps=c.eps / c.residual_scale**2, residual_scale=1.0
    )


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, rescaled(c), w, attention_block, mlp_block)


def gate_up_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value, which: str = "", width: int = 0) -> Value:
    """``mlp_block`` of a Hugging Face file."""
    parts = (f"ffn_gate_up{which}", f"ffn_gate{which}", f"ffn_up{which}", f"ffn_down{which}")
    return fused_mlp_block(b, c, w, i, h, parts, width)
