"""Nomic Embed (arXiv 2402.01613): BERT with a rotary embedding and a gated feed-forward, without biases. Its files have the names
of its makers' code, or transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from .bert import post_norm_layers
from .decoder import DecoderConfig, attention_block, fused_attention_block, mlp_block
from .weights import Weights

HF_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
HF_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "vocab_size": 30528,
    "layer_norm_eps": 1e-12,
    "rope_theta": 1000.0,
}
HF_PREFIX = "nomic_bert."
HF_NAMES = {
    "token_embd.weight": "nomic_bert.embeddings.word_embeddings.weight",
    "token_types.weight": "nomic_bert.embeddings.token_type_embeddings.weight",
    **{
        f"token_embd_norm.{kind}": (f"nomic_bert.embeddings.LayerNorm.{kind}", f"nomic_bert.emb_ln.{kind}")
        for kind in ("weight", "bias")
    },
    **{
        f"blk.{{i}}.{name}.{kind}": (f"nomic_bert.layers.{{i}}.{own}.{kind}", f"nomic_bert.encoder.layers.{{i}}.{old}.{kind}")
        for name, own, old in (
            ("attn_output_norm", "post_attention_layernorm", "norm1"),
            ("layer_output_norm", "post_mlp_layernorm", "norm2"),
            ("attn_q", "self_attn.q_proj", "attn.q_proj"),
            ("attn_k", "self_attn.k_proj", "attn.k_proj"),
            ("attn_v", "self_attn.v_proj", "attn.v_proj"),
            ("attn_qkv", "self_attn.qkv_proj", "attn.Wqkv"),
            ("attn_output", "self_attn.o_proj", "attn.out_proj"),
            ("ffn_gate", "mlp.gate_proj", "mlp.fc12"),
            ("ffn_up", "mlp.up_proj", "mlp.fc11"),
            ("ffn_down", "mlp.down_proj", "mlp.fc2"),
        )
        for kind in ("weight", "bias")
    },
}  # fmt: skip
_PLAIN: Mapping[str, Any] = {
    "activation_function": "swiglu",
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
    "parallel_block": False,
    "causal": False,
    "num_experts": 0,
}
"""What keys of its makers' code may say."""


def needless(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The head that guesses at masked tokens, and what reads the first one."""
    return "pooler.", "nomic_bert.pooler.", "cls."


def flattened(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Its makers' key of the norms' epsilon is gpt2's."""
    data = dict(checkpoint.metadata)
    if "rotary_emb_base" in data:
        data["rope_theta"] = data["rotary_emb_base"]
    if "layer_norm_epsilon" in data:
        data["layer_norm_eps"] = data["layer_norm_epsilon"]
    return data | {"rms_norm_eps": data.get("layer_norm_eps")}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data = checkpoint.metadata
    wrong = [key for key, value in _PLAIN.items() if (data.get(key) or value) != value]
    if checkpoint.kind == "hf" and wrong:
        raise ModelError(
            f"The configuration's {wrong[0]} is {data[wrong[0]]!r}; of this architecture {_PLAIN[wrong[0]]!r} is known."
        )
    return replace(c, causal=False)


def _attention(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    fused = w.maybe(f"blk.{i}.attn_qkv.weight") is not None
    return (fused_attention_block if fused else attention_block)(b, c, w, i, h)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return post_norm_layers(b, c, w, _attention, mlp_block)
