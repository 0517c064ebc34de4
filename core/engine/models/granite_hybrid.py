"""Granite 4 (IBM): Granite's factors, with layers of Mamba-2 among those of attention, experts beside a shared feed-forward or
that one alone, and often no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import granite, granite_moe, mamba2
from .decoder import DecoderConfig, attention_block, mlp_block, pre_norm_layers
from .fields import first_of_layers, flag, integer, text
from .mamba2 import Mamba2, mamba_block
from .weights import Names, Weights

HF_DEFAULTS: Mapping[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    **mamba2.HF_DEFAULTS,
}
HF_NAMES: Names = {
    **granite_moe.HF_NAMES,
    # where there are no experts beside it
    "blk.{i}.ffn_gate_up.weight": granite_moe.HF_NAMES["blk.{i}.ffn_gate_up_shexp.weight"],
    "blk.{i}.ffn_down.weight": granite_moe.HF_NAMES["blk.{i}.ffn_down_shexp.weight"],
    **mamba2.names("model.layers.{i}.mamba."),
}
_ATTENTION = ("attention", "full_attention")
_STATES = ("mamba", "linear_attention")


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(DecoderConfig):
    """With state-space layers, of the sizes ``mamba``."""

    mamba: Mamba2


def flattened(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """A GGUF's metadata with the KV heads of layers of attention, where the file has a number a layer, 0 of the others."""
    return first_of_layers(checkpoint, "attention.head_count_kv")


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    c = granite.with_factors(c, checkpoint)
    return _of_gguf(c, checkpoint) if checkpoint.kind == "gguf" else _of_hf(c, checkpoint.metadata)


def _of_gguf(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data, arch = checkpoint.metadata, checkpoint.architecture
    recurrent = tuple(i for i in range(c.layers) if f"blk.{i}.ssm_out.weight" in checkpoint.tensors)
    turned = flag(data, f"{arch}.rope.scaling.finetuned", True)  # llama.cpp's way to say whether there are positions
    c = replace(c, recurrent=recurrent, rope=c.rope if turned else None)
    return GraniteHybridConfig(**vars(c), mamba=mamba2.of_gguf(checkpoint)) if recurrent else c


def _of_hf(c: DecoderConfig, data: Mapping[str, Any]) -> DecoderConfig:
    kinds = data.get("layer_types") or [_STATES[0]] * c.layers
    if not isinstance(kinds, list) or len(kinds) != c.layers or any(k not in _ATTENTION + _STATES for k in kinds):
        raise ModelError(
            f"The configuration's layer_types must name mamba or attention for each of {c.layers} layers of this model."
        )
    recurrent = tuple(i for i, kind in enumerate(kinds) if kind in _STATES)
    positions = text(data, "position_embedding_type", "none") == "rope"
    shared = integer(data, "shared_intermediate_size")
    c = replace(c, recurrent=recurrent, rope=c.rope if positions else None, mlp=c.mlp if c.experts else shared)
    if not recurrent:
        return c
    inner = integer(data, "mamba_expand") * c.hidden
    return GraniteHybridConfig(**vars(c), mamba=mamba2.of_hf(data, inner=inner))


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    def operator(b: Builder, scaled: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
        if isinstance(scaled, GraniteHybridConfig) and i in scaled.recurrent:
            return mamba_block(b, scaled.mamba, w, i, h, c.eps)  # no norm of the residual, which is scaled
        return attention_block(b, scaled, w, i, h)

    return pre_norm_layers(b, granite.rescaled(c), w, operator, _feed_forward)


def _feed_forward(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    if c.experts:
        return granite_moe.experts(b, c, w, i, h)
    return mlp_block(b, c, w, i, h) if w.checkpoint.kind == "gguf" else granite.gate_up_block(b, c, w, i, h)
