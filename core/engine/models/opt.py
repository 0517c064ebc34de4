"""OPT (arXiv 2205.01068): learned positions, layer norms before or, in one size, after each block. GGUF has no such
architecture."""

from __future__ import annotations

from dataclasses import replace

from ..backend.v1 import Value
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.weights import select
from .decoder import DecoderConfig, attention_block, logits, norm, plain_mlp_block, weightless_norm
from .fields import flag
from .weights import Weights

HF_KEYS = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
HF_NAMES = {
    "token_embd.weight": "model.decoder.embed_tokens.weight",
    "position_embd.weight": "model.decoder.embed_positions.weight",
    "project_in.weight": "model.decoder.project_in.weight",
    "project_out.weight": "model.decoder.project_out.weight",
    "output.weight": "lm_head.weight",
    **{f"output_norm.{kind}": f"model.decoder.final_layer_norm.{kind}" for kind in ("weight", "bias")},
    **{
        f"blk.{{i}}.{name}.{kind}": f"model.decoder.layers.{{i}}.{own}.{kind}"
        for name, own in (
            ("attn_norm", "self_attn_layer_norm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.out_proj"),
            ("ffn_norm", "final_layer_norm"),
            ("ffn_up", "fc1"),
            ("ffn_down", "fc2"),
        )
        for kind in ("weight", "bias")
    },
}
FIRST_POSITION = 2
"""Rows of the position table before that of position 0."""


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return replace(c, norm_after=checkpoint.metadata.get("do_layer_norm_before") is False)


def _norm(b: Builder, c: DecoderConfig, w: Weights, name: str, x: Value) -> Value:
    """A layer norm, with a weight of ones where the files keep none."""
    if flag(w.checkpoint.metadata, "layer_norm_elementwise_affine", True):
        return norm(b, c, w, name, x)
    return weightless_norm(b, c, x)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    if (inward := w.maybe("project_in.weight")) is not None:
        x = b.linear(x, inward)
    rows = slice(FIRST_POSITION, FIRST_POSITION + c.max_context)
    x = b.add(x, b.embed_positions(select("position_embd.weight", w("position_embd.weight"), rows)))
    for i in b.layers(c.layers):
        attn_norm, ffn_norm = f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm"
        if c.norm_after:
            x = _norm(b, c, w, attn_norm, b.add(x, attention_block(b, c, w, i, x)))
            x = _norm(b, c, w, ffn_norm, b.add(x, plain_mlp_block(b, c, w, i, x)))
        else:
            x = b.add(x, attention_block(b, c, w, i, _norm(b, c, w, attn_norm, x)))
            x = b.add(x, plain_mlp_block(b, c, w, i, _norm(b, c, w, ffn_norm, x)))
    if not c.norm_after and not flag(w.checkpoint.metadata, "_remove_final_layer_norm", False):
        x = _norm(b, c, w, "output_norm", x)
    if (outward := w.maybe("project_out.weight")) is not None:
        x = b.linear(x, outward)
    return logits(b, c, w, x)
