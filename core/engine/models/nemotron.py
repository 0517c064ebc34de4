"""Nemotron 4 and Minitron (arXiv 2402.16819, 2407.14679): layer norms whose stored weights lie around 0, a rotary embedding of a
part of each head, and a feed-forward of squared ReLU and no gate."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from . import llama
from .decoder import DecoderConfig
from .starcoder2 import build

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure"]

HF_KEYS = {"rms_norm_eps": "norm_eps"}
HF_DEFAULTS = {"max_position_embeddings": 4096, "partial_rotary_factor": 0.5, "tie_word_embeddings": False}
HF_NAMES = {name: own for name, own in llama.HF_NAMES.items() if "ffn_gate" not in name} | {
    name.replace(".weight", ".bias"): own.replace(".weight", ".bias")
    for name, own in llama.HF_NAMES.items()
    if "norm" in name
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return replace(c, norm_offset=1.0 if checkpoint.kind == "hf" else 0.0)  # GGUF files have it added
