"""OLMo 1 (arXiv 2402.00838): Llama's shape with layer norms that have no weights."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, logits, mlp_block, weightless_norm
from .weights import Weights

HF_DEFAULTS = {"tie_word_embeddings": False}
HF_NAMES = {name: own for name, own in llama.HF_NAMES.items() if "norm" not in name}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        x = b.add(x, attention_block(b, c, w, i, weightless_norm(b, c, x)))
        x = b.add(x, mlp_block(b, c, w, i, weightless_norm(b, c, x)))
    return logits(b, c, w, weightless_norm(b, c, x))
