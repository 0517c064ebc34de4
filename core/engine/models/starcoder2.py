"""StarCoder 2 (arXiv 2402.19173): Llama's attention with biases, layer norms, and a feed-forward without a gate."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, logits, norm, plain_mlp_block
from .weights import Weights

HF_KEYS = {"rms_norm_eps": "norm_epsilon"}
HF_DEFAULTS = {"max_position_embeddings": 4096}
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "ffn_" not in name},
    "output_norm.bias": "model.norm.bias",
    "blk.{i}.attn_norm.bias": "model.layers.{i}.input_layernorm.bias",
    **{
        f"blk.{{i}}.{name}.{kind}": f"model.layers.{{i}}.{own}.{kind}"
        for name, own in (("ffn_norm", "post_attention_layernorm"), ("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj"))
        for kind in ("weight", "bias")
    },
}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        x = b.add(x, attention_block(b, c, w, i, norm(b, c, w, f"blk.{i}.attn_norm", x)))
        x = b.add(x, plain_mlp_block(b, c, w, i, norm(b, c, w, f"blk.{i}.ffn_norm", x)))
    return logits(b, c, w, norm(b, c, w, "output_norm", x))
