"""Falcon (arXiv 2311.16867): attention and feed-forward side by side, with one layer norm (7B, 11B) or one each (40B and
180B), and few KV heads."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from .config import kv_heads_of
from .decoder import DecoderConfig, fused_attention_block, grouped_attention_block, logits, norm, plain_mlp_block
from .weights import Names, Weights

HF_KEYS = {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation", "rms_norm_eps": "layer_norm_epsilon"}
HF_PREFIX = "transformer."
HF_NAMES: Names = {
    "token_embd.weight": "transformer.word_embeddings.weight",
    "output.weight": "lm_head.weight",
    **{f"output_norm.{kind}": f"transformer.ln_f.{kind}" for kind in ("weight", "bias")},
    **{
        f"blk.{{i}}.{name}.{kind}": tuple(f"transformer.h.{{i}}.{own}.{kind}" for own in owns)
        for name, owns in (
            ("attn_norm", ("input_layernorm", "ln_mlp")),
            ("attn_norm_2", ("ln_attn",)),
            ("attn_qkv", ("self_attention.query_key_value",)),
            ("attn_output", ("self_attention.dense",)),
            ("ffn_up", ("mlp.dense_h_to_4h",)),
            ("ffn_down", ("mlp.dense_4h_to_h",)),
        )
        for kind in ("weight", "bias")
    },
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data = checkpoint.metadata
    if checkpoint.kind == "gguf":
        return c
    grouped = bool(data.get("new_decoder_architecture", False))
    if data.get("alibi") or not (grouped or data.get("parallel_attn", True)):
        raise ModelError("Falcon models with ALiBi positions or with blocks in sequence are not supported.")
    if grouped:
        return replace(c, kv_heads=kv_heads_of(data, "num_kv_heads", c.heads))
    return replace(c, kv_heads=1 if data.get("multi_query", True) else c.heads)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    # Hugging Face files keep the q, k and v of a KV head together; GGUF files keep all q, all k, all v.
    attention_block = grouped_attention_block if w.checkpoint.kind == "hf" else fused_attention_block
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = attention_input = norm(b, c, w, f"blk.{i}.attn_norm", x)
        if w.maybe(f"blk.{i}.attn_norm_2.weight") is not None:
            attention_input = norm(b, c, w, f"blk.{i}.attn_norm_2", x)
        summed = b.add(x, attention_block(b, c, w, i, attention_input))
        x = b.add(summed, plain_mlp_block(b, c, w, i, h))
    return logits(b, c, w, norm(b, c, w, "output_norm", x))
