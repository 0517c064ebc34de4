"""GGUF files of many families, by the published keys and the table of tensor names of the gguf package."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_models
from other_families import other_keys
from safetensors.numpy import load_file
from state_space_families import falcon_tensor
from younger_families import younger_keys, younger_tensors


def to_gguf(
    folder: Path,
    path: Path,
    arch: str,
    config: Any,
    keys: dict[str, Any],
    split: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda tensors: tensors,
    form: str = "F32",
) -> Path:
    """The checkpoint of a folder with transformers' configuration; ``keys``, without the architecture, are added, and
    ``split`` changes the folder's tensors first. ``form``: of the matrices."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (published_keys(arch, config) | keys).items():
        if value is not None:
            writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    tiny_models._add_vocab(writer, json.loads((folder / "tokenizer.json").read_text()))
    tensors = apart(arch, split(load_file(folder / "model.safetensors")))
    for name, array in {**converted(arch, config, tensors), **rope_factors(config)}.items():
        kind = gguf.GGMLQuantizationType[form if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind), raw_dtype=kind)
    tiny_models.finish(writer)
    return path


def published_keys(arch: str, config: Any) -> dict[str, Any]:
    if arch == "gemma4":  # whose layers differ in what has one value elsewhere
        config = deepcopy(config)
        config.allow_global_per_layer_attribute_access = True

    def first(*names: str) -> Any:
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)

    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    normal = arch in ("gpt2", "gptneox", "falcon", "starcoder2", "command-r", "cohere2", "nemotron", "phi2", "stablelm")
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": first("intermediate_size", "ffn_hidden_size", "n_inner") or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": first("num_key_value_heads", "num_kv_heads") or config.num_attention_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon" if normal else "attention.layer_norm_rms_epsilon": first(
            "rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps"
        ),
        "attention.sliding_window": first("sliding_window"),
        "rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
        "attn_logit_softcapping": first("attn_logit_softcapping"),
        "final_logit_softcapping": first("final_logit_softcapping"),
        "logit_scale": first("logit_scale"),
        "use_parallel_residual": first("use_parallel_residual"),
    }
    if arch == "gpt-oss":
        keys |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
            **yarn_keys(rope),
        }
    if arch in ("qwen2moe", "qwen3moe"):
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
        }
    if arch in ("gemma2", "gemma3"):
        # A key that GGUF defines for any architecture; without it the size of the model tells the scale.
        keys["attention.scale"] = config.query_pre_attn_scalar**-0.5
    return keys | younger_keys(arch, config) | other_keys(arch, config)


def yarn_keys(rope: dict[str, Any]) -> dict[str, Any]:
    if rope.get("rope_type") != "yarn":
        return {}
    own = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
    own |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    kept = {f"rope.scaling.{key}": rope[name] for name, key in own.items() if rope.get(name) is not None}
    return {"rope.scaling.type": "yarn"} | kept


def apart(arch: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A folder's tensors with those apart that lie in one there, and are several in a GGUF."""
    return younger_tensors(arch, tensors) if arch != "gpt-oss" else split_experts(tensors)


def split_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss: gate and up lie in turn in one tensor, the matrices transposed; its sinks become a weight."""
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        stem, _, part = name.rpartition(".experts.")
        if not stem or part[0].isdigit():
            found[name + ".weight" if name.endswith(".sinks") else name] = array
            continue
        own, kind = (part.removesuffix("_bias"), "bias") if part.endswith("_bias") else (part, "weight")
        columns = {"gate_proj": array[..., ::2], "up_proj": array[..., 1::2]}
        for proj, numbers in (columns if own == "gate_up_proj" else {own: array}).items():
            turned = numbers if kind == "bias" else numbers.swapaxes(1, 2)
            found[f"{stem}.experts.{proj}.{kind}"] = turned
    return found


def rope_factors(config: Any) -> dict[str, np.ndarray]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("full_attention", rope).get("rope_type") == "proportional":  # a divisor that stops a pair
        whole = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
        turned = int(rope["full_attention"]["partial_rotary_factor"] * whole // 2)
        return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (whole // 2 - turned), np.float32)}
    names = [name for name in ("long", "short") if f"{name}_factor" in rope]
    return {f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32) for name in names}


def converted(arch: str, config: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(
        next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        plain, _, expert = name.partition(".experts.")
        if expert[:1].isdigit():
            number, rest = expert.split(".", 1)
            experts.setdefault(names.get_name(f"{plain}.experts.{rest}", (".weight",)), {})[int(number)] = array
            continue
        own = name if name.endswith(".scale") else names.get_name(name, (".weight", ".bias"))
        assert own is not None, f"gguf knows no name for {name}"
        found[own] = rearranged(arch, config, name, array)
    return found | {name: np.stack([members[e] for e in sorted(members)]) for name, members in experts.items()}


def rearranged(arch: str, config: Any, name: str, array: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter does to the numbers."""
    neighbours = arch in ("llama", "arcee", "smollm3", "granite", "granitemoe", "mistral3", "olmo")
    if neighbours and ".q_proj." in name:
        return tiny_models.interleave(array, config.num_attention_heads)
    if neighbours and ".k_proj." in name:
        return tiny_models.interleave(array, config.num_key_value_heads)
    if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return array + 1
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        return array.reshape(config.n_groups if ".mixer." in name else config.mamba_n_groups, -1)
    if "query_key_value" in name:
        head_dim = config.hidden_size // config.num_attention_heads
        kv_heads = len(array) // head_dim - config.num_attention_heads
        kv_heads = 1 if getattr(config, "multi_query", False) and not config.new_decoder_architecture else kv_heads // 2
        grouped = array.reshape(kv_heads, -1, head_dim, *array.shape[1:])
        parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
        return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
    if arch == "falcon-h1":
        return falcon_tensor(config, name, array)
    if arch == "gpt2" and array.ndim == 2 and ".h." in name:
        return array.T
    return array
