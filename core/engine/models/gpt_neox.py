"""GPT-NeoX and Pythia (arXiv 2204.06745): layer norms, a rotary embedding on part of each head, and attention and
feed-forward side by side. The activation is the exact GELU that the models are trained with, in either format."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from ..program.build import Builder, Program
from .decoder import DecoderConfig, fused_attention_block, grouped_attention_block, logits, norm, plain_mlp_block
from .weights import Names, Weights

HF_KEYS = {
    "rms_norm_eps": "layer_norm_eps",
    "partial_rotary_factor": "rotary_pct",
    "rope_theta": "rotary_emb_base",
}
HF_DEFAULTS = {"rotary_pct": 0.25}
HF_PREFIX = "gpt_neox."
HF_NAMES: Names = {
    "token_embd.weight": "gpt_neox.embed_in.weight",
    "output.weight": ("embed_out.weight", "lm_head.weight"),
    **{f"output_norm.{kind}": f"gpt_neox.final_layer_norm.{kind}" for kind in ("weight", "bias")},
    **{
        f"blk.{{i}}.{name}.{kind}": f"gpt_neox.layers.{{i}}.{own}.{kind}"
        for name, own in (
            ("attn_norm", "input_layernorm"),
            ("attn_qkv", "attention.query_key_value"),
            ("attn_output", "attention.dense"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_up", "mlp.dense_h_to_4h"),
            ("ffn_down", "mlp.dense_4h_to_h"),
        )
        for kind in ("weight", "bias")
    },
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    key = "gptneox.use_parallel_residual" if checkpoint.kind == "gguf" else "use_parallel_residual"
    return replace(c, parallel_residual=bool(checkpoint.metadata.get(key, True)))


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    # Hugging Face files keep q, k and v of a head together; GGUF files keep all q, all k, all v.
    attention_block = grouped_attention_block if w.checkpoint.kind == "hf" else fused_attention_block
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        summed = b.add(x, attention_block(b, c, w, i, norm(b, c, w, f"blk.{i}.attn_norm", x)))
        source = x if c.parallel_residual else summed
        x = b.add(summed, plain_mlp_block(b, c, w, i, norm(b, c, w, f"blk.{i}.ffn_norm", source)))
    return logits(b, c, w, norm(b, c, w, "output_norm", x))
