"""LFM2, with and without experts: layers of a short convolution between two gates among layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.weights import select
from .decoder import DecoderConfig, attention_block, mlp_block, pre_norm_layers
from .experts import ExpertsConfig, feed_forward, gguf_routing, routing
from .fields import first_of_layers, flag, integer, positive
from .weights import Weights, needs_rows

HF_KEYS = {"rms_norm_eps": "norm_eps", "intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}
_BOTH = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
# By architecture.
HF_DEFAULTS: Mapping[str, Any] = {
    "lfm2": {**_BOTH, "intermediate_size": 12288},
    "lfm2_moe": {
        **_BOTH,
        "intermediate_size": 7168,
        "block_auto_adjust_ff_dim": False,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
    },
}
_LAYER = "model.layers.{i}."
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": _LAYER + "operator_norm.weight",
    "blk.{i}.attn_q.weight": _LAYER + "self_attn.q_proj.weight",
    "blk.{i}.attn_k.weight": _LAYER + "self_attn.k_proj.weight",
    "blk.{i}.attn_v.weight": _LAYER + "self_attn.v_proj.weight",
    "blk.{i}.attn_q_norm.weight": _LAYER + "self_attn.q_layernorm.weight",
    "blk.{i}.attn_k_norm.weight": _LAYER + "self_attn.k_layernorm.weight",
    "blk.{i}.attn_output.weight": _LAYER + "self_attn.out_proj.weight",
    "blk.{i}.shortconv.conv.weight": _LAYER + "conv.conv.weight",
    "blk.{i}.shortconv.in_proj.weight": _LAYER + "conv.in_proj.weight",
    "blk.{i}.shortconv.out_proj.weight": _LAYER + "conv.out_proj.weight",
    "blk.{i}.ffn_norm.weight": _LAYER + "ffn_norm.weight",
    "blk.{i}.ffn_gate.weight": (
        _LAYER + "feed_forward.w1.weight",
        _LAYER + "feed_forward.gate_proj.weight",
    ),  # the latter of mlx-lm
    "blk.{i}.ffn_up.weight": (_LAYER + "feed_forward.w3.weight", _LAYER + "feed_forward.up_proj.weight"),
    "blk.{i}.ffn_down.weight": (_LAYER + "feed_forward.w2.weight", _LAYER + "feed_forward.down_proj.weight"),
    "blk.{i}.ffn_gate_inp.weight": _LAYER + "feed_forward.gate.weight",
    "blk.{i}.exp_probs_b.bias": _LAYER + "feed_forward.expert_bias",
    "blk.{i}.ffn_gate_up_exps.weight": _LAYER + "feed_forward.experts.gate_up_proj",
    "blk.{i}.ffn_gate_exps.weight": _LAYER + "feed_forward.experts.{e}.w1.weight",
    "blk.{i}.ffn_up_exps.weight": _LAYER + "feed_forward.experts.{e}.w3.weight",
    "blk.{i}.ffn_down_exps.weight": (
        _LAYER + "feed_forward.experts.down_proj",
        _LAYER + "feed_forward.experts.{e}.w2.weight",
    ),
}


def flattened(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """A GGUF's metadata with the KV heads of layers of attention, where the file has a number a layer, 0 of the others."""
    return first_of_layers(checkpoint, "attention.head_count_kv")


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data = checkpoint.metadata
    if checkpoint.kind == "gguf":
        c = replace(
            c, recurrent=tuple(i for i in range(c.layers) if f"blk.{i}.shortconv.conv.weight" in checkpoint.tensors)
        )
    else:
        c = replace(c, recurrent=_recurrent(c, data), mlp=_width(c, data))
    return _with_experts(c, checkpoint) if c.experts else c


def _with_experts(c: DecoderConfig, checkpoint: Checkpoint) -> ExpertsConfig:
    data, gguf = checkpoint.metadata, checkpoint.kind == "gguf"
    arch = checkpoint.architecture
    first, norm = (
        ("leading_dense_block_count", "expert_weights_norm") if gguf else ("num_dense_layers", "norm_topk_prob")
    )
    prefix = f"{arch}." if gguf else ""
    c = replace(c, renormalize=flag(data, prefix + norm, True))
    how = gguf_routing(c, checkpoint) if gguf else routing(c, "sigmoid", positive(data, "routed_scaling_factor", 1.0))
    return ExpertsConfig(**vars(c), dense=integer(data, prefix + first, 0, low=0), shared=0, routing=how)


def _recurrent(c: DecoderConfig, data: Mapping[str, Any]) -> tuple[int, ...]:
    kinds, attention = data.get("layer_types"), data.get("full_attn_idxs")
    if kinds is None and isinstance(attention, list):
        kinds = ["full_attention" if i in attention else "conv" for i in range(c.layers)]
    if not isinstance(kinds, list) or len(kinds) != c.layers or any(k not in ("conv", "full_attention") for k in kinds):
        raise ModelError(
            f"The configuration's layer_types must name conv or full_attention for each of {c.layers} layers."
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "conv")


def _width(c: DecoderConfig, data: Mapping[str, Any]) -> int:
    """Of the feed-forward: two thirds of what the configuration says, times a factor, up to a whole multiple."""
    if not flag(data, "block_auto_adjust_ff_dim", True):
        return c.mlp
    width = int(2 * c.mlp / 3)
    if data.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    multiple = integer(data, "block_multiple_of", 256)
    return -(-int(positive(data, "block_ffn_dim_multiplier", 1.0) * width) // multiple) * multiple


def _conv_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    """The rows of one matrix are those of the gate before the convolution, of that behind it, and of what it filters."""
    p = f"blk.{i}.shortconv."
    weight, conv = w(p + "in_proj.weight"), w(p + "conv.weight").dense()
    needs_rows(weight, 3 * c.hidden)
    before, behind, x = (
        b.linear(h, select(f"{p}{name}.weight", weight, slice(n * c.hidden, (n + 1) * c.hidden)), axes=(None, "embed"))
        for n, name in enumerate(("before", "behind", "filtered"))
    )
    taps = b.constant(p + "conv.weight", conv.reshape(len(conv), -1))
    filtered = b.causal_conv(i, b.gated_act(before, x, "identity"), taps, act="identity")
    return b.linear(b.gated_act(behind, filtered, "identity"), w(p + "out_proj.weight"), axes=("embed", None))


def _operator(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    return _conv_block(b, c, w, i, h) if i in c.recurrent else attention_block(b, c, w, i, h, qk_norm="head")


def _feed_forward(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    return feed_forward(b, c, w, i, h) if isinstance(c, ExpertsConfig) else mlp_block(b, c, w, i, h)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, _operator, _feed_forward, last_norm="token_embd_norm")
