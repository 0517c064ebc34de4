"""ModernBERT (arXiv 2412.13663): an encoder with norms before each block, a rotary embedding and a gated feed-forward; two of
three layers see a window on both sides of a token, and have a rotary embedding of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from .decoder import DecoderConfig, fused_attention_block, fused_mlp_block, norm
from .fields import integer, positive
from .rope import Rope, base_frequencies, rope_of_kinds
from .weights import Weights

HF_KEYS = {"rms_norm_eps": "norm_eps", "hidden_act": "hidden_activation"}
HF_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "vocab_size": 50368,
    "norm_eps": 1e-5,
    "local_attention": 128,
}
HF_NAMES = {
    "token_embd.weight": "model.embeddings.tok_embeddings.weight",
    **{
        f"{name}.{kind}": f"model.{own}.{kind}"
        for name, own in (
            ("token_embd_norm", "embeddings.norm"),
            ("output_norm", "final_norm"),
            ("blk.{i}.attn_norm", "layers.{i}.attn_norm"),
            ("blk.{i}.ffn_norm", "layers.{i}.mlp_norm"),
            ("blk.{i}.attn_qkv", "layers.{i}.attn.Wqkv"),
            ("blk.{i}.attn_output", "layers.{i}.attn.Wo"),
            ("blk.{i}.ffn_up", "layers.{i}.mlp.Wi"),
            ("blk.{i}.ffn_down", "layers.{i}.mlp.Wo"),
        )
        for kind in ("weight", "bias")
    },
}
THETAS = {"global": 160000.0, "local": 10000.0}


def needless(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The head that guesses at masked tokens."""
    return "head.", "decoder."


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data, arch = checkpoint.metadata, checkpoint.architecture
    gguf = checkpoint.kind == "gguf"
    width = integer(data, f"{arch}.attention.sliding_window" if gguf else "local_attention", 128)
    whole = _whole_layers(c, checkpoint)
    windows = tuple(0 if sees_all else width // 2 + 1 for sees_all in whole)
    if not gguf and data.get("rope_parameters") is not None:
        local, full = rope_of_kinds(data, c.head_dim, c.max_context)
    else:
        keys = ("rope.freq_base_swa", "rope.freq_base") if gguf else ("local_rope_theta", "global_rope_theta")
        names = (f"{arch}.{key}" if gguf else key for key in keys)
        bases = (positive(data, key, THETAS[kind]) for key, kind in zip(names, ("local", "global"), strict=True))
        local, full = (Rope(base_frequencies(c.head_dim, base), interleaved=False) for base in bases)
    return replace(c, causal=False, windows=windows, local_rope=local, rope=full)


def _whole_layers(c: DecoderConfig, checkpoint: Checkpoint) -> list[bool]:
    """Whether each layer sees the whole text. ModelError where the file's list is not one of all layers."""
    data = checkpoint.metadata
    if checkpoint.kind == "gguf":
        key = f"{checkpoint.architecture}.attention.sliding_window_pattern"
        told = data.get(key)
        if isinstance(told, (list, np.ndarray)):
            found = [not windowed for windowed in told]
        else:
            found = [i % integer(data, key, 3) == 0 for i in range(c.layers)]
    else:
        key, told = "layer_types", data.get("layer_types")
        every = integer(data, "global_attn_every_n_layers", 3)
        found = [kind == "full_attention" for kind in told] if isinstance(told, list) else []
        if told is None:
            found = [i % every == 0 for i in range(c.layers)]
    if len(found) != c.layers:
        raise ModelError(f"The configuration's {key} must say of each of {c.layers} layers what it sees.")
    return found


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    x = norm(b, c, w, "token_embd_norm", b.embed(w("token_embd.weight")))
    for i in b.layers(c.layers):
        h = norm(b, c, w, f"blk.{i}.attn_norm", x) if i else x
        x = b.add(x, fused_attention_block(b, c, w, i, h))
        x = b.add(x, fused_mlp_block(b, c, w, i, norm(b, c, w, f"blk.{i}.ffn_norm", x)))
    return b.finish(norm(b, c, w, "output_norm", x), w("token_embd.weight"))
