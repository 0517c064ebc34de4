"""GPT-2: learned positions, layer norms, fused q, k and v; Hugging Face files hold its matrices transposed."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.weights import select
from .decoder import DecoderConfig, fused_attention_block, logits, norm, plain_mlp_block
from .weights import Weights

HF_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
HF_DEFAULTS = {"max_position_embeddings": 1024}
HF_PREFIX = "transformer."
HF_NAMES = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output.weight": "lm_head.weight",
    **{f"output_norm.{kind}": f"transformer.ln_f.{kind}" for kind in ("weight", "bias")},
    **{
        f"blk.{{i}}.{name}.{kind}": f"transformer.h.{{i}}.{own}.{kind}"
        for name, own in (
            ("attn_norm", "ln_1"),
            ("attn_qkv", "attn.c_attn"),
            ("attn_output", "attn.c_proj"),
            ("ffn_norm", "ln_2"),
            ("ffn_up", "mlp.c_fc"),
            ("ffn_down", "mlp.c_proj"),
        )
        for kind in ("weight", "bias")
    },
}
HF_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    if checkpoint.metadata.get("scale_attn_by_inverse_layer_idx"):
        raise ModelError("scale_attn_by_inverse_layer_idx is not supported; GPT-2 itself does not set it.")
    return c if checkpoint.metadata.get("scale_attn_weights", True) else replace(c, attention_scale=1.0)


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    table = select("position_embd.weight", w("position_embd.weight"), slice(0, c.max_context))
    x = b.add(b.embed(w("token_embd.weight")), b.embed_positions(table))
    for i in b.layers(c.layers):
        x = b.add(x, fused_attention_block(b, c, w, i, norm(b, c, w, f"blk.{i}.attn_norm", x)))
        x = b.add(x, plain_mlp_block(b, c, w, i, norm(b, c, w, f"blk.{i}.ffn_norm", x)))
    return logits(b, c, w, norm(b, c, w, "output_norm", x))
