"""Phi 1, 1.5 and 2 (arXiv 2306.11644, 2309.05463): one layer norm for attention and feed-forward side by side, a rotary embedding
of a part of each head, biases throughout, on the logits too, and a feed-forward without a gate."""

from __future__ import annotations

from ..program.build import Builder, Program
from .decoder import DecoderConfig, attention_block, fused_attention_block, logits, norm, plain_mlp_block
from .weights import Weights

HF_KEYS = {"rms_norm_eps": "layer_norm_eps"}
HF_DEFAULTS = {"partial_rotary_factor": 0.5, "tie_word_embeddings": False}
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    **{
        f"{name}.{kind}": f"{own}.{kind}"
        for name, own in (
            ("output_norm", "model.final_layernorm"),
            ("output", "lm_head"),
            ("blk.{i}.attn_norm", "model.layers.{i}.input_layernorm"),
            ("blk.{i}.attn_q", "model.layers.{i}.self_attn.q_proj"),
            ("blk.{i}.attn_k", "model.layers.{i}.self_attn.k_proj"),
            ("blk.{i}.attn_v", "model.layers.{i}.self_attn.v_proj"),
            ("blk.{i}.attn_output", "model.layers.{i}.self_attn.dense"),
            ("blk.{i}.ffn_up", "model.layers.{i}.mlp.fc1"),
            ("blk.{i}.ffn_down", "model.layers.{i}.mlp.fc2"),
        )
        for kind in ("weight", "bias")
    },
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = norm(b, c, w, f"blk.{i}.attn_norm", x)
        # the first GGUF files of Phi 2 keep the rows of q, k and v in one matrix
        fused = w.maybe(f"blk.{i}.attn_qkv.weight") is not None
        summed = b.add(x, (fused_attention_block if fused else attention_block)(b, c, w, i, h))
        x = b.add(summed, plain_mlp_block(b, c, w, i, h))
    return logits(b, c, w, norm(b, c, w, "output_norm", x))
