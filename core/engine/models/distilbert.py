"""DistilBERT (arXiv 1910.01108): BERT with half of the layers, and without types of tokens."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from . import bert
from .decoder import DecoderConfig

HF_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
HF_DEFAULTS = {
    "dim": 768,
    "n_layers": 6,
    "n_heads": 12,
    "hidden_dim": 3072,
    "activation": "gelu",
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}
build = bert.build
HF_PREFIX = "distilbert."
HF_NAMES = {
    "token_embd.weight": "distilbert.embeddings.word_embeddings.weight",
    "position_embd.weight": "distilbert.embeddings.position_embeddings.weight",
    **{f"token_embd_norm.{kind}": f"distilbert.embeddings.LayerNorm.{kind}" for kind in ("weight", "bias")},
    **{
        f"blk.{{i}}.{name}.{kind}": f"distilbert.transformer.layer.{{i}}.{own}.{kind}"
        for name, own in (
            ("attn_q", "attention.q_lin"),
            ("attn_k", "attention.k_lin"),
            ("attn_v", "attention.v_lin"),
            ("attn_output", "attention.out_lin"),
            ("attn_output_norm", "sa_layer_norm"),
            ("ffn_up", "ffn.lin1"),
            ("ffn_down", "ffn.lin2"),
            ("layer_output_norm", "output_layer_norm"),
        )
        for kind in ("weight", "bias")
    },
}


def needless(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The head that guesses at masked tokens."""
    return ("vocab_",)


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    return replace(c, causal=False)
