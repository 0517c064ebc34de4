"""OLMo 1 (arXiv 2402.00838): Llama's shape with layer norms that have no weights."""

from __future__ import annotations

import numpy as np

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, logits, mlp_block
from .weights import Weights

HF_DEFAULTS = {"tie_word_embeddings": False}
HF_NAMES = {name: own for name, own in llama.HF_NAMES.items() if "norm" not in name}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    for key in ("clip_qkv", f"{checkpoint.architecture}.attention.clamp_kqv"):
        if checkpoint.metadata.get(key):
            raise ModelError(
                f"The configuration's {key} is set, but q, k and v are not clipped here; it must be absent."
            )
    return c


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        x = b.add(x, attention_block(b, c, w, i, _norm(b, c, x)))
        x = b.add(x, mlp_block(b, c, w, i, _norm(b, c, x)))
    return logits(b, c, w, _norm(b, c, x))


def _norm(b: Builder, c: DecoderConfig, x: Value) -> Value:
    return b.layer_norm(x, b.constant("norm.weight", np.ones(c.hidden)), None, c.eps)
