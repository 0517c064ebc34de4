"""EXAONE 3 and 3.5 (arXiv 2412.04862): Llama's shape; the published files have names of their own."""

from __future__ import annotations

from collections.abc import Mapping

from . import llama
from .llama import build
from .weights import Names

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build"]

HF_KEYS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
HF_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
# Llama's -> their own, the longer ones first
_OUTER = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
}
_INNER = {
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".self_attn.o_proj.": ".attn.attention.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".gate_proj.": ".c_fc_0.",
    ".up_proj.": ".c_fc_1.",
    ".down_proj.": ".c_proj.",
}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for usual, own in names.items():
        name = name.replace(usual, own)
    return name


# transformers saves the usual names, some of them alone without a head
HF_NAMES: Names = {
    name: (usual, _renamed(usual, _INNER), _renamed(usual, _INNER | _OUTER)) for name, usual in llama.HF_NAMES.items()
}
