"""EuroBERT (arXiv 2503.05500): Llama's shape as an encoder."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from . import llama
from .decoder import DecoderConfig

HF_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
}
HF_NAMES = llama.HF_NAMES
build = llama.build


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return replace(c, causal=False)
