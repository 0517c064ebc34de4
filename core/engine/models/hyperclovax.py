"""HyperCLOVA X SEED Think (Naver): Granite's factors, but for logits that are multiplied by theirs, and norms on both sides of
attention and feed-forward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..backend.v1 import Value
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import granite, llama
from .decoder import DecoderConfig, after, attention_block, mlp_block, pre_norm_layers
from .fields import positive
from .weights import Weights

HF_DEFAULTS = {"tie_word_embeddings": False}
HF_NAMES = {
    **llama.HF_NAMES,
    "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_norm1.weight",
    "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_norm2.weight",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    c = granite.with_factors(c, checkpoint)
    scale = positive(checkpoint.metadata, "attention_multiplier", c.head_dim**-0.5)
    return replace(c, logit_scale=1 / c.logit_scale, attention_scale=scale)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    # the norms before a block read the divided residual, those behind it do not
    blocks = partial(_attention, plain=c), partial(_feed_forward, plain=c)
    return pre_norm_layers(b, granite.rescaled(c), w, *blocks)


def _attention(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value, plain: DecoderConfig) -> Value:
    return after(b, plain, w, f"blk.{i}.post_attention_norm.weight", attention_block(b, c, w, i, h))


def _feed_forward(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value, plain: DecoderConfig) -> Value:
    return after(b, plain, w, f"blk.{i}.post_ffw_norm.weight", mlp_block(b, c, w, i, h))
