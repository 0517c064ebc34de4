"""A small random llama over a real vocabulary, as a GGUF."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import tiny_models

from engine.formats import open_checkpoint

HIDDEN, MLP, HEADS, LAYERS = 32, 64, 2, 1
_COPIED = ("scores", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token")


def write_vocab_model(vocab: Path, path: Path, rng: np.random.Generator, context: int = 1024) -> Path:
    """``vocab``: a GGUF with a tokenizer. The logits have a deviation of about one."""
    metadata = open_checkpoint(vocab).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    if "tokenizer.ggml.pre" in metadata:
        writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(tokens)
    for name in _COPIED:
        key = f"tokenizer.ggml.{name}"
        if (value := metadata.get(key)) is None:
            continue
        if isinstance(value, np.ndarray):
            writer.add_array(key, value.tolist())
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    for name, shape in _shapes(len(tokens)).items():
        matrix = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        writer.add_tensor(f"{name}.weight", matrix if len(shape) > 1 else np.ones(shape, np.float32))
    tiny_models.finish(writer)
    return path


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {name: (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        norms = {name: (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        feed = {"ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in {**block, **norms, **feed}.items()}
    return shapes
