"""Families beside those that most people run: as FAMILIES and GGUF_KEYS of test_more_families.py, of which they are a part."""

from __future__ import annotations

from typing import Any

from younger_families import expert_keys

WINDOW = 24
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
GEMMA = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
}
HYPERCLOVA = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 0.5,
    "rms_norm_eps": 0.05,  # so large that it shows
}
KINDS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
NORMS = {"layer_norm_eps": 0.05}  # so large that it shows
NTK = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

# name -> (transformers' class, GGUF's architecture or None, what differs from SIZES)
OTHER: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "phi": ("Phi", "phi2", NORMS),
    "phi shared heads": ("Phi", None, {"rope_parameters": PARTIAL, "num_key_value_heads": 1}),
    "stablelm": ("StableLm", "stablelm", NORMS | {"use_qkv_bias": True}),
    "stablelm side by side": ("StableLm", "stablelm", {"use_parallel_residual": True, "rope_parameters": PARTIAL}),
    "olmo": ("Olmo", "olmo", {}),
    "olmo tied": ("Olmo", None, {"tie_word_embeddings": True, "attention_bias": True}),
    "flex_olmo": ("FlexOlmo", None, {"num_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan": ("HunYuanDenseV1", "hunyuan-dense", {"head_dim": 16, "tie_word_embeddings": True}),
    "hunyuan alpha": ("HunYuanDenseV1", "hunyuan-dense", {"head_dim": 32, "rope_parameters": NTK}),
    "hunyuan_moe": ("HunYuanMoEV1", "hunyuan-moe", {"head_dim": 16, "num_experts": 8, "moe_topk": 2}),
    "hyperclovax": ("HyperCLOVAX", None, HYPERCLOVA),
    "hyperclovax plain": ("HyperCLOVAX", None, {"use_post_norm": False, "head_dim": 32}),
    "helium": ("Helium", None, {"head_dim": 16}),
    "vaultgemma": ("VaultGemma", None, GEMMA),
    "mellum": (
        "Mellum",
        None,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
        | {"sliding_window": WINDOW, "num_hidden_layers": 3, "rope_parameters": KINDS}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "norm_topk_prob": False},
    ),
    "jais2": ("Jais2", None, NORMS | {"head_dim": 16}),
    "iquestcoder": ("IQuestCoder", None, {"head_dim": 16}),
    "ministral": (
        "Ministral",
        None,
        {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"], "head_dim": 16},
    ),
    "cwm": ("Cwm", None, {"sliding_window": WINDOW, "num_hidden_layers": 5, "head_dim": 16}),
    "youtu": ("Youtu", "deepseek2", LATENT),
}
OTHER_GGUF_KEYS: dict[str, dict[str, Any]] = {
    "stablelm side by side": {"rope.dimension_count": 4},
    "hunyuan alpha": {"rope.freq_base": 10000.0 * 50.0 ** (32 / 30)},
}


def other_keys(arch: str, config: Any) -> dict[str, Any]:
    """What GGUF files of these families have beyond the keys of all."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch in ("phi2", "stablelm"):
        return {"rope.dimension_count": int(config.rope_parameters["partial_rotary_factor"] * head_dim)}
    if arch == "hunyuan-moe":
        shared = {"expert_shared_count": 1, "expert_shared_feed_forward_length": config.intermediate_size}
        return shared | expert_keys(config, "expert_count", "expert_used_count", "expert_feed_forward_length")
    if arch == "olmo":
        return {"attention.layer_norm_epsilon": 1e-5}
    if arch == "deepseek2":
        return {
            "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length": config.v_head_dim,
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "rope.dimension_count": config.qk_rope_head_dim,
        }
    return {}
