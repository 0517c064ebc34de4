"""Granite 3 with experts: gate and up of each lie in one tensor of Hugging Face files, the gate's rows first, and so do those of
experts that all tokens share."""

from __future__ import annotations

from ..backend.v1 import Value
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import granite, llama
from .decoder import DecoderConfig, attention_block, mlp_block, moe_block, pre_norm_layers
from .weights import Weights

HF_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_MOE = "model.layers.{i}.block_sparse_moe."
_SHARED = "model.layers.{i}.shared_mlp."
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "ffn_" not in name},
    "blk.{i}.ffn_norm.weight": llama.HF_NAMES["blk.{i}.ffn_norm.weight"],
    "blk.{i}.ffn_gate_inp.weight": _MOE + "router.layer.weight",
    "blk.{i}.ffn_gate_up_exps.weight": _MOE + "input_linear.weight",
    "blk.{i}.ffn_down_exps.weight": _MOE + "output_linear.weight",
    "blk.{i}.ffn_gate_up_shexp.weight": _SHARED + "input_linear.weight",
    "blk.{i}.ffn_down_shexp.weight": _SHARED + "output_linear.weight",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return granite.with_factors(c, checkpoint)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, granite.rescaled(c), w, attention_block, experts)


def experts(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    routed = moe_block(b, c, w, i, h)
    down = w.maybe(f"blk.{i}.ffn_down_shexp.weight")
    if down is None:
        return routed
    block = mlp_block if w.checkpoint.kind == "gguf" else granite.gate_up_block
    return b.add(routed, block(b, c, w, i, h, "_shexp", down.shape[-1]))
