"""A random llama in the shape of Llama 3.1 8B, in bf16, written as it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from engine.ops.dtypes import from_f32

LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
PATTERN = 1 << 22


def write_model(folder: Path, layers: int, tiny: bool) -> Path:
    """The folder, with config.json, model.safetensors and a tokenizer of bytes."""
    config: dict[str, Any] = {
        "model_type": "llama", "num_hidden_layers": layers, "vocab_size": 320 if tiny else 128256,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **(SMALL if tiny else LARGE),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder / "tokenizer.json")
    shapes = _shapes(config)
    header: dict[str, Any] = {}
    place = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pattern = np.random.default_rng().standard_normal(min(PATTERN, place), np.float32)
    ones = from_f32(np.ones(config["hidden_size"], np.float32), "bf16")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(np.uint64(len(text)).tobytes() + text)
        for shape in shapes.values():
            if len(shape) == 1:
                file.write(ones.tobytes())
                continue
            row = from_f32(pattern * np.float32(shape[-1] ** -0.5), "bf16")
            left = int(np.prod(shape))
            while left:
                file.write(row[:left].tobytes())
                left -= min(left, len(row))
    return folder


def embedding_bytes(folder: Path) -> int:
    """Of the table of embeddings, from which a step reads a row a token."""
    config = json.loads((folder / "config.json").read_text())
    return 2 * int(config["vocab_size"]) * int(config["hidden_size"])


def prompt_operations(folder: Path, weights: int, tokens: int) -> int:
    """Of the products in a prompt's step, two for each number of two bytes and row: ``weights`` bytes beside the embeddings, of
    which the head, as large as those, has one row."""
    head = embedding_bytes(folder)
    return (weights - head) * tokens + head


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    own = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes | {"lm_head.weight": (vocab, hidden)}


def _write_tokenizer(path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path))
