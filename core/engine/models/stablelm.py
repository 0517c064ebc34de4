"""StableLM 2 and StableLM 3B (arXiv 2402.17834): Llama's shape with layer norms and a rotary embedding of a part of each head. In
one size attention and feed-forward lie side by side, behind one norm."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import llama
from .decoder import DecoderConfig, QKNorm, attention_block, logits, mlp_block, norm
from .fields import flag
from .weights import Weights

HF_KEYS = {"rms_norm_eps": "layer_norm_eps"}
HF_DEFAULTS = {
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
}
HF_NAMES = {
    **llama.HF_NAMES,
    "output_norm.bias": "model.norm.bias",
    "blk.{i}.attn_norm.bias": "model.layers.{i}.input_layernorm.bias",
    "blk.{i}.ffn_norm.bias": "model.layers.{i}.post_attention_layernorm.bias",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """GGUF files of the size with one norm have no other, whatever their key says."""
    if checkpoint.kind == "gguf":
        return replace(c, parallel_residual="blk.0.ffn_norm.weight" not in checkpoint.tensors)
    return replace(c, parallel_residual=flag(checkpoint.metadata, "use_parallel_residual", False))


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = norm(b, c, w, f"blk.{i}.attn_norm", x)
        kind: QKNorm = "none" if w.maybe(f"blk.{i}.attn_q_norm.weight") is None else "each head"
        x = b.add(x, attention_block(b, c, w, i, h, kind))
        if not c.parallel_residual:
            h = norm(b, c, w, f"blk.{i}.ffn_norm", x)
        x = b.add(x, mlp_block(b, c, w, i, h))
    return logits(b, c, w, norm(b, c, w, "output_norm", x))
