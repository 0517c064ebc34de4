"""Families of 2025: as FAMILIES and GGUF_KEYS of test_more_families.py, of which they are a part."""

from __future__ import annotations

from typing import Any

import numpy as np
from state_space_families import state_space_keys, state_space_tensor
from tiny_models import VOCAB

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
MINISTRAL_YARN = YARN | {
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.6,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 0.5,
    "rms_norm_eps": 0.05,  # so large that it shows
}
WINDOW = {"sliding_window": 24, "num_hidden_layers": 5}
GLM_EXPERTS = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.5,
}
GLM_EXPERTS_ALONE = {key: value for key, value in GLM_EXPERTS.items() if key != "head_dim"}
EXAONE_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
AFMOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "route_scale": 1.5,
}
ERNIE_EXPERTS = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "num_hidden_layers": 3}
LINEAR = {
    "rms_norm_eps": 0.01,  # or rows that are nearly 0 have their rounding enlarged
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_hidden_layers": 5,
}
ROUTED = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "rms_norm_eps": 0.01,  # so large that it shows
    "tie_word_embeddings": True,
}
LFM2 = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "block_multiple_of": 32,
    "norm_eps": 0.01,
    "tie_word_embeddings": True,
}
OWN_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}

# name -> (transformers' class, GGUF's architecture or None, what differs from SIZES)
YOUNGER: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", "smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3 other layers": ("SmolLM3", None, {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 1]}),
    "granite": ("Granite", "granite", GRANITE),
    "granite biases": ("Granite", None, GRANITE | {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "granitemoe": ("GraniteMoe", "granitemoe", GRANITE | {"num_local_experts": 4}),
    "granitemoe shared": (
        "GraniteMoeShared",
        "granitemoe",
        GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 48},
    ),
    "olmo3": ("Olmo3", "olmo2", WINDOW),
    "olmo3 yarn": (
        "Olmo3",
        "olmo2",
        WINDOW | {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN | {"attention_factor": 1.3}}},
    ),
    "olmoe": ("Olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "exaone4": ("Exaone4", "exaone4", WINDOW | {"sliding_window_pattern": 4}),
    "exaone4 whole": ("Exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone": ("Exaone", "exaone", {"head_dim": 16}),
    "exaone_moe": ("ExaoneMoe", "exaone-moe", WINDOW | EXAONE_EXPERTS | {"sliding_window_pattern": 4}),
    "exaone_moe groups, whole": (
        "ExaoneMoe",
        None,
        EXAONE_EXPERTS
        | {"layer_types": ["full_attention"] * 2, "num_shared_experts": 2}
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "mlp_layer_types": ["sparse"] * 2},
    ),
    "internlm3": ("InternLM3", "llama", {"head_dim": 32}),
    "internlm3 biases": ("InternLM3", None, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "nemotron": ("Nemotron", "nemotron", {"head_dim": 16, "norm_eps": 0.05}),
    "nemotron biases": ("Nemotron", None, {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "solar_open": ("SolarOpen", None, GLM_EXPERTS | {"n_shared_experts": 2}),
    "ministral3": ("Ministral3", "mistral3", {"head_dim": 16, "rope_parameters": MINISTRAL_YARN}),
    "glm": ("Glm", "chatglm", {"head_dim": 16}),
    "glm4": ("Glm4", "glm4", {"head_dim": 16}),
    "glm4_moe": ("Glm4Moe", "glm4moe", GLM_EXPERTS | {"use_qk_norm": True}),
    "glm4_moe biases, groups": (
        "Glm4Moe",
        None,
        GLM_EXPERTS | {"attention_bias": True, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        None,
        GLM_EXPERTS_ALONE
        | {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
        | {"num_key_value_heads": 4},
    ),
    "arcee": ("Arcee", "arcee", {"head_dim": 16}),
    "arcee biases": ("Arcee", None, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "afmoe": ("Afmoe", "afmoe", WINDOW | AFMOE | {"mup_enabled": True, "num_shared_experts": 1}),
    "afmoe every second layer, not scaled": ("Afmoe", None, WINDOW | AFMOE | {"global_attn_every_n_layers": 2}),
    "dots1": (
        "Dots1",
        "dots1",
        GLM_EXPERTS | {"first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": True},
    ),
    "dots1 windows": (
        "Dots1",
        None,
        GLM_EXPERTS
        | {"n_shared_experts": 1, "n_group": 4, "topk_group": 2, "sliding_window": 24, "max_window_layers": 1},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        "minimax-m2",
        {"head_dim": 32, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "ernie4_5": ("Ernie4_5", "ernie4_5", {"head_dim": 16, "tie_word_embeddings": True}),
    "ernie4_5 biases": ("Ernie4_5", None, {"head_dim": 32, "use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe": ("Ernie4_5_Moe", "ernie4_5-moe", ERNIE_EXPERTS),
    "seed_oss": ("SeedOss", "seed_oss", {"head_dim": 16}),
    "qwen3_next": ("Qwen3Next", None, LINEAR | ROUTED | {"mlp_only_layers": [1]}),
    "qwen3_next experts in all layers": ("Qwen3Next", None, LINEAR | ROUTED),
    "qwen3_5": ("Qwen3_5", None, LINEAR | {"linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", None, LINEAR | ROUTED | {"num_hidden_layers": 4}),
    "lfm2": ("Lfm2", "lfm2", LFM2),
    "lfm2_moe": (
        "Lfm2Moe",
        "lfm2moe",
        {k: v for k, v in LFM2.items() if k != "block_multiple_of"}
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 2}
        | {"routed_scaling_factor": 1.5},
    ),
    "lfm2 width as it is": ("Lfm2", None, LFM2 | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4}),
    "gemma4": ("Gemma4", "gemma4", GEMMA4 | OWN_INPUTS | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    "gemma4 keys are values": (
        "Gemma4",
        "gemma4",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
    ),
    "gemma4 experts": (
        "Gemma4",
        "gemma4",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
}
YOUNGER_GGUF_KEYS: dict[str, dict[str, Any]] = {
    "olmo3 yarn": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 4.0,
        "rope.scaling.yarn_attn_factor": 1.3,
    },
    "ministral3": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 4.0,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.6,
    },
    "glm": {"rope.dimension_count": 8},
    "glm4": {"rope.dimension_count": 8},
    "glm4_moe": {"rope.dimension_count": 8},
    "minimax_m2": {"rope.dimension_count": 16},
    "nemotron": {"rope.dimension_count": 8},
}


# GGUF's keys of experts: what transformers' configurations call them
EXPERT_KEYS = {
    "expert_count": ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts"),
    "expert_used_count": ("moe_topk", "moe_k", "top_k_experts", "num_experts_per_tok"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
}
_COUNTS = ("expert_count", "expert_used_count")
_WIDTHS = (*_COUNTS, "expert_feed_forward_length")
# architecture -> those that its files have
EXPERTS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("granitemoe", "olmoe", "minimax-m2"), _COUNTS),
    **dict.fromkeys(("glm4moe", "dots1", "exaone-moe"), tuple(EXPERT_KEYS)),
    "afmoe": (*_WIDTHS, "expert_shared_count", "expert_weights_scale", "leading_dense_block_count"),
    "lfm2moe": (*_WIDTHS, "expert_weights_scale", "leading_dense_block_count"),
    "ernie4_5-moe": (*_WIDTHS, "expert_shared_count", "leading_dense_block_count"),
}


def expert_keys(config: Any, *keys: str) -> dict[str, Any]:
    """What a configuration says under each of the keys."""
    return {key: next(getattr(config, name) for name in EXPERT_KEYS[key] if hasattr(config, name)) for key in keys}


def younger_keys(arch: str, config: Any) -> dict[str, Any]:
    """What GGUF files of these families have beyond the keys of all."""
    keys = state_space_keys(arch, config)
    if arch in ("granite", "granitemoe"):
        keys |= {
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "attention.scale": config.attention_multiplier,
            "logit_scale": config.logits_scaling,
        }
    if arch == "granitemoe":
        keys["expert_shared_feed_forward_length"] = getattr(config, "shared_intermediate_size", None)
    if arch == "granite" and config.model_type == "granitemoehybrid":
        keys["feed_forward_length"] = config.shared_intermediate_size
    if arch in EXPERTS_OF:
        keys |= expert_keys(config, *EXPERTS_OF[arch])
    if arch in ("glm4moe", "dots1", "exaone-moe", "minimax-m2", "lfm2moe", "afmoe"):
        keys["expert_gating_func"] = 2
    if arch in ("exaone-moe", "ernie4_5-moe"):
        keys["expert_shared_feed_forward_length"] = keys["expert_shared_count"] * config.moe_intermediate_size
    if arch == "ernie4_5-moe":
        keys["interleave_moe_layer_step"] = config.moe_layer_interval
    if arch == "gemma4":
        keys |= gemma4_keys(config)
    if arch in ("lfm2", "lfm2moe"):
        heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in config.layer_types]
        keys |= {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache}
        keys["attention.layer_norm_rms_epsilon"] = config.norm_eps
    if arch == "lfm2":
        keys["feed_forward_length"] = 64
    return keys


def gemma4_keys(config: Any) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    local = [kind == "sliding_attention" for kind in config.layer_types]
    whole = config.per_layer_config[local.index(False)]
    wide = config.num_hidden_layers - (config.num_kv_shared_layers if config.use_double_wide_mlp else 0)
    kv_heads = [config.num_key_value_heads if local[i] else whole.num_key_value_heads for i in layers]
    return {
        "feed_forward_length": [config.intermediate_size * (2 if i >= wide else 1) for i in layers],
        "attention.head_count_kv": kv_heads if len(set(kv_heads)) > 1 else kv_heads[0],
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.sliding_window_pattern": local,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.dimension_count": whole.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


_GEMMA4_NAMES = {
    "layer_scalar": "{name}.weight",
    "experts.gate_up_proj": "{name}.weight",
    "experts.down_proj": "{name}.weight",
    "router.scale": "blk.{i}.ffn_gate_inp.scale",
    "router.per_expert_scale": "blk.{i}.ffn_down_exps.scale",
}


def younger_tensors(arch: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A folder's tensors with those apart that lie in one there."""
    found: dict[str, np.ndarray] = {}
    routed = any("block_sparse_moe" in name for name in tensors)
    for name, array in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        which = "_exps" if "block_sparse_moe" in name else "_shexp" if routed else ""
        if name.endswith("input_linear.weight"):
            half = array.shape[-2] // 2
            found[f"blk.{layer}.ffn_gate{which}.weight"] = array[..., :half, :]
            found[f"blk.{layer}.ffn_up{which}.weight"] = array[..., half:, :]
        elif name.endswith("output_linear.weight"):
            found[f"blk.{layer}.ffn_down{which}.weight"] = array
        elif name.endswith(".conv.conv.weight"):
            found[name] = array.reshape(len(array), -1)
        elif name.endswith("expert_bias"):
            found[f"blk.{layer}.exp_probs_b.bias"] = array
        elif arch == "lfm2moe" and ".experts." in name:  # names that the table knows
            plain = name.replace("feed_forward", "mlp")
            for own, known in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                plain = plain.replace(f".{own}.", f".{known}.")
            found[plain] = array
        elif name.endswith("e_score_correction_bias"):
            found[name.removesuffix("_bias") + ".bias"] = array.reshape(-1)
        elif ".mamba." in name or ".mixer." in name:
            own, numbers = state_space_tensor(name, array)
            found[own] = numbers
        else:
            found[_GEMMA4_NAMES.get(name.rpartition(f"layers.{layer}.")[2], "{name}").format(name=name, i=layer)] = (
                array
            )
    return found
