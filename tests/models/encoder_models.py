"""Tiny random encoders, made and judged by transformers, and their GGUF files by the table of names of the gguf package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import tiny_models
from checkpoints import torch, transformers
from safetensors.numpy import load_file

SIZES = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
WINDOWED = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
GEMMA = {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 24, "use_bidirectional_attention": True}
GEMMA |= {"query_pre_attn_scalar": 16}  # as GGUF files have it
NORMS = {"layer_norm_eps": 0.05}  # so large that it shows
MARKS = {"bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
THETAS = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

# name -> (transformers' class, GGUF's architecture or None, what differs from SIZES)
ENCODERS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "bert": ("Bert", "bert", NORMS),
    "bert of another activation": ("Bert", None, {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "roberta": ("Roberta", None, {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", "bert", {"pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": ("Camembert", None, {"pad_token_id": 5}),
    "distilbert": ("DistilBert", None, {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}),
    "nomic_bert": ("NomicBert", "nomic-bert", NORMS | {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    "modernbert": ("ModernBert", "modern-bert", MARKS | {"local_attention": 22, "rope_parameters": THETAS}),
    "modernbert silu": ("ModernBert", "modern-bert", MARKS | {"hidden_activation": "silu"}),
    "modernbert with biases": ("ModernBert", None, MARKS | {"norm_bias": True, "attention_bias": True, "local_attention": 400}),
    "eurobert": ("EuroBert", "eurobert", MARKS | {"num_key_value_heads": 2, "head_dim": 32}),
    "llama turned": ("Llama", "llama", {"num_key_value_heads": 2, "is_causal": False}),
    "embedding gemma": ("Gemma3Text", "gemma-embedding", GEMMA | {"layer_types": WINDOWED["layer_types"][::-1]}),
}  # fmt: skip


@cache
def encoder_of(name: str) -> Any:
    """transformers' model in f32 with every parameter random, norms and biases too."""
    kind, _, changes = ENCODERS[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes), attn_implementation="eager")
    model = getattr(transformers, f"{kind}Model")(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in parameter_name.lower() else 0.5 if parameter_name.endswith("bias") else None
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + scale * noise if scale else 1.5 * noise / parameter.shape[-1] ** 0.5)
    return model


def states_of(name: str, ids: list[int]) -> np.ndarray:
    """f64 [tokens, hidden], as transformers has them."""
    with torch.no_grad():
        return encoder_of(name)(torch.tensor([ids])).last_hidden_state[0].numpy().astype(np.float64)


def encoder_gguf(name: str, path: Path, extra: Mapping[str, np.ndarray] = MappingProxyType({})) -> Path:
    """As llama.cpp's converter writes it: of RoBERTa's kind positions begin with the first token's. ``extra`` are others."""
    kind, arch, _ = ENCODERS[name]
    config, rope = encoder_of(name).config, getattr(encoder_of(name).config, "rope_parameters", None) or {}
    folder = path.parent / "as a folder"
    encoder_of(name).save_pretrained(folder)
    first = config.pad_token_id + 1 if kind == "XLMRoberta" else 0
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings - first,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", getattr(config, "norm_eps", None)),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.causal": False,
        "pooling_type": 2,
        "rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "hidden_activation": getattr(config, "hidden_activation", None) if arch == "modern-bert" else None,
        "attention.sliding_window": getattr(config, "local_attention", None),
        "attention.key_length": getattr(config, "head_dim", None),
    }
    if kind == "Gemma3Text":
        keys["attention.sliding_window"] = GEMMA["sliding_window"]
        keys["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config.layer_types]
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    tiny_models.write_tokenizer(folder)
    tiny_models._add_vocab(writer, json.loads((folder / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper().replace("-", "_")], config.num_hidden_layers)
    for own, array in as_published(kind, load_file(folder / "model.safetensors")).items():
        if (found := names.get_name(own, try_suffixes=(".weight", ".bias"))) is not None:
            writer.add_tensor(found, laid_out(kind, own, array, config))
    for own, array in extra.items():
        writer.add_tensor(own, array)
    tiny_models.finish(writer)
    return path


def laid_out(kind: str, own: str, array: np.ndarray, config: Any) -> np.ndarray:
    if kind == "XLMRoberta" and "position_embeddings" in own:
        return array[config.pad_token_id + 1 :]
    if kind == "Gemma3Text" and "norm" in own:
        return array + 1
    if kind == "Llama" and own.endswith(("q_proj.weight", "k_proj.weight")):
        return tiny_models.interleave(array, len(array) // (config.hidden_size // config.num_attention_heads))
    return array


OF_NOMIC = {
    "embeddings.LayerNorm": "emb_ln",
    ".self_attn.o_proj": ".attn.out_proj",
    ".mlp.up_proj": ".mlp.fc11",
    ".mlp.gate_proj": ".mlp.fc12",
    ".mlp.down_proj": ".mlp.fc2",
    ".post_attention_layernorm": ".norm1",
    ".post_mlp_layernorm": ".norm2",
}


def as_published(kind: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as its makers' files have them: with q, k and v of Nomic's in one, without what embeddings need not."""
    found = {name: array for name, array in tensors.items() if not name.startswith("pooler.")}
    if kind != "NomicBert" or any("Wqkv" in name for name in found):
        return found
    made = {}
    for name, array in found.items():
        stem, part, _ = name.partition(".self_attn.q_proj.weight")
        if part:
            three = [found[f"{stem}.self_attn.{one}_proj.weight"] for one in "qkv"]
            made[f"encoder.{stem}.attn.Wqkv.weight"] = np.concatenate(three)
        elif "_proj.weight" not in name or "self_attn.o" in name or ".mlp." in name:
            published = name
            for own, other in OF_NOMIC.items():
                published = published.replace(own, other)
            made[f"encoder.{published}" if name.startswith("layers.") else published] = array
    return made
