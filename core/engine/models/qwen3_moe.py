"""Qwen 3 with experts: a layer with a router has experts, one without is Qwen 3's own."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import qwen2, qwen3
from .decoder import DecoderConfig, attention_block, mlp_block, moe_block, output_head
from .weights import Weights

HF_DEFAULTS = {**qwen2.DEFAULTS, "num_experts_per_tok": 8}
HF_NAMES = {
    **qwen3.HF_NAMES,
    "blk.{i}.ffn_gate_inp.weight": "model.layers.{i}.mlp.gate.weight",
    "blk.{i}.ffn_gate_exps.weight": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    "blk.{i}.ffn_up_exps.weight": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    "blk.{i}.ffn_down_exps.weight": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """GGUF files have no key for it: their experts' weights always sum to 1."""
    return replace(c, renormalize=checkpoint.kind == "gguf" or bool(checkpoint.metadata.get("norm_topk_prob", False)))


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = b.rms_norm(x, w(f"blk.{i}.attn_norm.weight"), c.eps)
        x = b.add(x, attention_block(b, c, w, i, h, qk_norm="head"))
        h = b.rms_norm(x, w(f"blk.{i}.ffn_norm.weight"), c.eps)
        sparse = w.maybe(f"blk.{i}.ffn_gate_inp.weight") is not None
        x = b.add(x, moe_block(b, c, w, i, h) if sparse else mlp_block(b, c, w, i, h))
    return output_head(b, c, w, x)
