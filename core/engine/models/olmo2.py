"""OLMo 2 (arXiv 2501.00656): norms after attention and feed-forward rather than before, and norms of all of q and k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..backend.v1 import Value
from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, mlp_block, output_head
from .weights import Weights

HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "_norm." not in name},
    "output_norm.weight": "model.norm.weight",
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return layers(b, c, w, qk_norm="row")


def layers(
    b: Builder,
    c: DecoderConfig,
    w: Weights,
    qk_norm: Literal["head", "row"],
    feed_forward: Callable[[Builder, DecoderConfig, Weights, int, Value], Value] = mlp_block,
) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = attention_block(b, c, w, i, x, qk_norm)
        x = b.add(x, b.rms_norm(h, w(f"blk.{i}.post_attention_norm.weight"), c.eps))
        h = feed_forward(b, c, w, i, x)
        x = b.add(x, b.rms_norm(h, w(f"blk.{i}.post_ffw_norm.weight"), c.eps))
    return output_head(b, c, w, x)
