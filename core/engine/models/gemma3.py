"""Gemma 3, text only (arXiv 2503.19786): Gemma 2 with norms of q and k in place of its caps of scores, a window on five of six
layers, and a rotary embedding of its own on these."""

from __future__ import annotations

from dataclasses import replace

from ..formats import Checkpoint
from ..formats.pooling import GGUF_DENSE
from ..program.build import Builder, Program
from . import gemma2
from .decoder import DecoderConfig
from .fields import flag, positive
from .rope import Rope, base_frequencies, rope_of_kinds
from .weights import Weights

HF_KEYS = gemma2.HF_KEYS
# What transformers takes where a file leaves it out (Gemma3TextConfig), as those of models that take images do.
HF_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
HF_NAMES = {
    **gemma2.HF_NAMES,
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
}
LARGEST = 62
LOCAL_THETA = 10000.0


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    c, data = gemma2.with_scales(c, checkpoint, LARGEST), checkpoint.metadata
    c = replace(c, logit_softcap=gemma2.softcap(checkpoint, "final"))
    both = checkpoint.architecture == "gemma-embedding" or flag(data, "use_bidirectional_attention", False)
    if both:  # EmbeddingGemma, whose window is split to both sides
        c = replace(c, causal=False, windows=tuple(width and width // 2 + 1 for width in c.windows))
    if checkpoint.kind == "gguf":
        theta = positive(data, f"{checkpoint.architecture}.rope.freq_base_swa", LOCAL_THETA)
        return replace(c, local_rope=Rope(base_frequencies(c.head_dim, theta), interleaved=False))
    if data.get("rope_parameters") is None:  # files from before rope_parameters keep the two apart
        theta = positive(data, "rope_local_base_freq", LOCAL_THETA)
        return replace(c, local_rope=Rope(base_frequencies(c.head_dim, theta), interleaved=False))
    local, full = rope_of_kinds(data, c.head_dim, c.max_context)
    return replace(c, local_rope=local, rope=full)


def needless(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What EmbeddingGemma's vectors go through, once they are pooled."""
    return GGUF_DENSE if checkpoint.architecture == "gemma-embedding" else ()


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    return gemma2.layers(b, c, w, qk_norm="head")
