"""Hunyuan with experts (A13B): its dense models' attention, and in each layer routed experts beside one that all tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import hunyuan, qwen3_moe
from .decoder import DecoderConfig, mlp_block, moe_block, pre_norm_layers
from .weights import Weights

HF_KEYS = {"num_experts_per_tok": "moe_topk"}
HF_DEFAULTS = {"tie_word_embeddings": False, "moe_topk": 1}
_MLP = "model.layers.{i}.mlp."
HF_NAMES = {
    **{name: own for name, own in hunyuan.HF_NAMES.items() if "ffn_" not in name or "norm" in name},
    "blk.{i}.ffn_gate_inp.weight": _MLP + "gate.wg.weight",
    **{name: own for name, own in qwen3_moe.HF_NAMES.items() if "_exps" in name},
    **{f"blk.{{i}}.ffn_{name}_shexp.weight": f"{_MLP}shared_mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


def flattened(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """config.json may have a number for each layer where all are alike."""
    data = dict(checkpoint.metadata)
    for key in ("moe_topk", "num_experts"):
        numbers = data.get(key)
        if isinstance(numbers, list) and numbers:
            if any(number != numbers[0] for number in numbers):
                raise ModelError(
                    f"The configuration's {key} must be the same for all layers, as in Hunyuan's own models."
                )
            data[key] = numbers[0]
    return data


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return replace(c, renormalize=True)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, hunyuan.attention, _feed_forward)


def _feed_forward(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    shared = w(f"blk.{i}.ffn_down_shexp.weight").shape[-1]
    return b.add(moe_block(b, c, w, i, h), mlp_block(b, c, w, i, h, "_shexp", shared))
