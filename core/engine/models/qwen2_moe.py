"""Qwen 1.5 and 2 with experts: Qwen 2's attention, routed experts, and one more that all tokens share, behind a gate of its
own."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import qwen2, qwen3_moe
from .decoder import DecoderConfig, attention_block, mlp_block, moe_block, output_head, shared_expert_block
from .fields import flag
from .weights import Weights

# Without layer_types, max_window_layers means what it does for Qwen 2; to transformers, windows on every other layer below it.
HF_DEFAULTS = {**qwen2.DEFAULTS, "num_experts_per_tok": 4}
HF_NAMES = {
    **{
        name: own for name, own in qwen3_moe.HF_NAMES.items() if "attn_q_norm" not in name and "attn_k_norm" not in name
    },
    "blk.{i}.ffn_gate_inp_shexp.weight": "model.layers.{i}.mlp.shared_expert_gate.weight",
    "blk.{i}.ffn_gate_shexp.weight": "model.layers.{i}.mlp.shared_expert.gate_proj.weight",
    "blk.{i}.ffn_up_shexp.weight": "model.layers.{i}.mlp.shared_expert.up_proj.weight",
    "blk.{i}.ffn_down_shexp.weight": "model.layers.{i}.mlp.shared_expert.down_proj.weight",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """GGUF files have no key for it: their experts' weights are shares of all experts."""
    return replace(c, renormalize=checkpoint.kind == "hf" and flag(checkpoint.metadata, "norm_topk_prob", False))


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = b.rms_norm(x, w(f"blk.{i}.attn_norm.weight"), c.eps)
        x = b.add(x, attention_block(b, c, w, i, h))
        h = b.rms_norm(x, w(f"blk.{i}.ffn_norm.weight"), c.eps)
        if w.maybe(f"blk.{i}.ffn_gate_inp.weight") is None:
            x = b.add(x, mlp_block(b, c, w, i, h))
            continue
        x = b.add(x, moe_block(b, c, w, i, h))
        x = b.add(x, shared_expert_block(b, c, w, i, h))
    return output_head(b, c, w, x)
