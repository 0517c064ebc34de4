"""Arcee's AFM: Llama's shape, with a feed-forward of squared ReLU and no gate."""

from __future__ import annotations

from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, attention_block, plain_mlp_block, pre_norm_layers
from .weights import Weights

HF_DEFAULTS = {"max_position_embeddings": 4096}
HF_NAMES = {name: own for name, own in llama.HF_NAMES.items() if "ffn_gate" not in name}


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, attention_block, plain_mlp_block)
