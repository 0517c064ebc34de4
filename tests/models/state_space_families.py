"""Families with state-space layers of Mamba-2: as FAMILIES of test_more_families.py, of which they are a part, and what their
GGUF files have."""

from __future__ import annotations

from typing import Any

import numpy as np

_GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 0.5,
    "rms_norm_eps": 0.05,  # so large that it shows
    "shared_intermediate_size": 96,
}
_GRANITE_STATES = _GRANITE | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
}
_ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
_NEMOTRON = {
    "head_dim": 16,
    "layer_norm_epsilon": 0.05,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
}
_NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
}
_FALCON = {
    "num_hidden_layers": 3,
    "rms_norm_eps": 0.05,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.6, 1.4, 0.8, 1.2, 0.5],
    "mlp_multipliers": [0.75, 1.6],
}

# name -> (transformers' class, GGUF's architecture or None, what differs from SIZES)
STATE_SPACE: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "granite 4 states, experts": (
        "GraniteMoeHybrid",
        "granitehybrid",
        _GRANITE_STATES | _ROUTED | {"mamba_n_groups": 2, "shared_intermediate_size": 48},
    ),
    "granite 4 states": ("GraniteMoeHybrid", "granitehybrid", _GRANITE_STATES | {"num_local_experts": 0}),
    "granite 4": (
        "GraniteMoeHybrid",
        "granite",
        _GRANITE | {"num_local_experts": 0, "layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
    ),
    "granite 4 states, positions, biases": (
        "GraniteMoeHybrid",
        None,
        _GRANITE_STATES
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_d_conv": 3},
    ),
    "granite 4 experts, no states": (
        "GraniteMoeHybrid",
        None,
        _GRANITE | _ROUTED | {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
    ),
    "nemotron_h narrow experts, groups": (
        "NemotronH",
        "nemotron_h_moe",
        _NEMOTRON | _NEMOTRON_EXPERTS | {"moe_latent_size": 32, "n_group": 4, "topk_group": 2},
    ),
    "nemotron_h": ("NemotronH", "nemotron_h", _NEMOTRON),
    "nemotron_h biases": ("NemotronH", None, _NEMOTRON | {"mlp_bias": True, "use_bias": True, "attention_bias": True}),
    "falcon_h1": ("FalconH1", "falcon-h1", _FALCON),
    "falcon_h1 norms": ("FalconH1", "falcon-h1", _FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon_h1 norms before gates": (
        "FalconH1",
        None,
        _FALCON | {"mamba_rms_norm": True, "mamba_conv_bias": False, "mamba_d_ssm": None, "mamba_n_heads": 8},
    ),
    "falcon_h1 tied, biases": (
        "FalconH1",
        None,
        _FALCON
        | {"tie_word_embeddings": True}
        | {f"{name}_bias": True for name in ("attention", "mlp", "mamba_proj", "projectors")},
    ),
    "nemotron_h experts": ("NemotronH", "nemotron_h_moe", _NEMOTRON | _NEMOTRON_EXPERTS),
}


def state_space_keys(arch: str, config: Any) -> dict[str, Any]:
    """What their GGUF files have beyond the keys of all."""
    granite, falcon = arch == "granitehybrid", arch == "falcon-h1"
    if not granite and not falcon and not arch.startswith("nemotron_h"):
        return {}
    kinds = config.layer_types if granite else config.layers_block_type
    own = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_d_head")
    if not granite and not falcon:
        own = ("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel", "mamba_head_dim")
    heads, groups, state, width, head_dim = (getattr(config, name) for name in own)
    keys = {
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "ssm.conv_kernel": width,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": heads * head_dim,
        "ssm.time_step_rank": heads,
        "rope.scaling.finetuned": False,
    }
    if falcon:
        return {name: value for name, value in keys.items() if name.startswith("ssm.")}
    return keys | (_granite_keys(config) if granite else _nemotron_keys(config, kinds))


def _granite_keys(config: Any) -> dict[str, Any]:
    return {
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "attention.scale": config.attention_multiplier,
        "logit_scale": config.logits_scaling,
        "rope.freq_base": None,
        "feed_forward_length": config.intermediate_size,
        **(_granite_experts(config) if config.num_local_experts else {}),
    }


def _granite_experts(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
    }


def _nemotron_keys(config: Any, kinds: list[str]) -> dict[str, Any]:
    width = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    keys = {"feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds]}
    if "moe" not in kinds:
        return keys
    return keys | {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group if config.n_group > 1 else None,
        "expert_group_used_count": config.topk_group if config.n_group > 1 else None,
        "moe_latent_size": config.moe_latent_size,
    }


def state_space_tensor(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of a folder by a name that gguf's table knows, as llama.cpp's converter leaves it."""
    end = name.rpartition(".")[2]
    if end == "A_log":
        return name, -np.exp(array).reshape(-1, 1)
    if end == "D":
        return name, array.reshape(-1, 1)
    if end == "dt_bias":
        return name.removesuffix("_bias") + "_proj.bias", array
    if name.endswith(".conv1d.weight"):
        return name, array.reshape(len(array), -1)
    if ".mixer.experts." in name:
        return name.replace("backbone.", "model.").replace(".mixer.", ".mlp."), array
    return name, array


def falcon_tensor(config: Any, name: str, array: np.ndarray) -> np.ndarray:
    """With the factors of Falcon-H1's configuration, which its GGUF files have in the weights alone."""
    columns, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    gate, down = config.mlp_multipliers
    within = {
        ".embed_tokens.": config.embedding_multiplier,
        "lm_head.": config.lm_head_multiplier,
        ".q_proj.": config.attention_in_multiplier,
        ".k_proj.": config.attention_in_multiplier * config.key_multiplier,
        ".v_proj.": config.attention_in_multiplier,
        ".o_proj.": config.attention_out_multiplier,
        ".out_proj.": config.ssm_out_multiplier,
        ".gate_proj.": gate,
        ".down_proj.": down,
    }
    if ".in_proj." in name:
        rows = [columns, columns, states, states, config.mamba_n_heads]
        return array * np.float32(config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, rows))[:, None]
    return array * np.float32(next((factor for part, factor in within.items() if part in name), 1.0))
