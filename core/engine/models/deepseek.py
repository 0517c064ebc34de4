"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437), and Kimi K2 and GLM 4.7 Flash, which are made like V3: latent
attention in its absorbed form, and experts beside shared ones.

A token's cache holds its latent and one rotary key, which all heads share. Instead of unfolding the latent to keys and
values of each head, W_UK is applied to the queries and W_UV to the result; both are parts of kv_b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backend.v1 import Array, Value, WeightRef
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.weights import TransposedHeadWeight, of_heads, select
from . import llama
from .decoder import DecoderConfig, grown, pre_norm_layers
from .experts import (
    HF_EXPERTS,
    ExpertsConfig,
    dense_layers,
    feed_forward,
    gguf_experts,
    routing,
    shared_width,
    unused,
)
from .fields import flag, integer, positive, text
from .rope import query_growth, rope_scaling, yarn_scale
from .weights import Weights, needs_rows

__all__ = ["HF_DEFAULTS", "HF_KEYS", "HF_NAMES", "build", "configure", "unused"]

HF_KEYS = {"head_dim": "qk_rope_head_dim", "num_experts": "n_routed_experts"}
_THIRD = {
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
# By architecture.
HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": _THIRD,
    "kimi_k2": _THIRD,
    "youtu": {"max_position_embeddings": 131072, "tie_word_embeddings": True},
    "glm4_moe_lite": {
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
    },
}
_ATTENTION = {
    "attn_q.weight": "q_proj.weight",
    "attn_q_a.weight": "q_a_proj.weight",
    "attn_q_a.bias": "q_a_proj.bias",
    "attn_q_a_norm.weight": "q_a_layernorm.weight",
    "attn_q_b.weight": "q_b_proj.weight",
    "attn_kv_a_mqa.weight": "kv_a_proj_with_mqa.weight",
    "attn_kv_a_mqa.bias": "kv_a_proj_with_mqa.bias",
    "attn_kv_a_norm.weight": "kv_a_layernorm.weight",
    "attn_kv_b.weight": "kv_b_proj.weight",
    "attn_k_b.weight": "embed_q.weight",  # kv_b taken apart by mlx-lm
    "attn_v_b.weight": "unembed_out.weight",
    "attn_output.weight": "o_proj.weight",
    "attn_output.bias": "o_proj.bias",
}
HF_NAMES = {
    **{name: own for name, own in llama.HF_NAMES.items() if "attn_" not in name},
    "blk.{i}.attn_norm.weight": llama.HF_NAMES["blk.{i}.attn_norm.weight"],
    **{f"blk.{{i}}.{name}": f"model.layers.{{i}}.self_attn.{own}" for name, own in _ATTENTION.items()},
    **HF_EXPERTS,
}
_LATENT_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ExpertsConfig):
    """``q_rank`` 0: queries without a latent of their own. A head's query and key have ``nope`` dimensions without
    position and ``rotary`` with it."""

    q_rank: int
    kv_rank: int
    nope: int
    rotary: int
    v_dim: int
    latent_eps: float


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DeepseekConfig:
    growth, span = query_growth(checkpoint)
    c = replace(c, query_growth=growth, query_span=span)  # Mistral Large 3 and Small 4 have it
    return _from_gguf(c, checkpoint) if checkpoint.kind == "gguf" else _from_hf(c, checkpoint)


def _from_hf(c: DecoderConfig, checkpoint: Checkpoint) -> DeepseekConfig:
    data, third = checkpoint.metadata, checkpoint.architecture != "deepseek_v2"
    if integer(data, "moe_layer_freq", 1, high=4096) != 1:
        raise ModelError("The configuration's moe_layer_freq must be 1: each layer after the dense ones has experts.")
    nope, rotary = integer(data, "qk_nope_head_dim"), integer(data, "qk_rope_head_dim")
    scale = (nope + rotary) ** -0.5
    scaling = rope_scaling(data)
    if scaling.get("mscale_all_dim") and text(scaling, "rope_type", text(scaling, "type", "default")) != "default":
        scale *= yarn_scale(positive(scaling, "factor"), positive(scaling, "mscale_all_dim")) ** 2
    interleaved = not third or flag(data, "rope_interleave", True)
    grouped = third or _topk_method(data) == "group_limited_greedy"
    groups, kept = (integer(data, key, 1) if grouped else 1 for key in ("n_group", "topk_group"))
    score = "sigmoid" if third else "softmax"
    return _completed(
        replace(c, rope=None if c.rope is None else replace(c.rope, interleaved=interleaved)),
        routing=routing(c, score, positive(data, "routed_scaling_factor", 1.0), groups, kept),
        renormalize=_renormalized(data, third),
        attention_scale=scale,
        q_rank=integer(data, "q_lora_rank", 0, low=0),
        kv_rank=integer(data, "kv_lora_rank"),
        nope=nope,
        rotary=rotary,
        v_dim=integer(data, "v_head_dim"),
        latent_eps=_LATENT_EPS,
        dense=dense_layers(data),
        shared=shared_width(data, "n_shared_experts", "moe_intermediate_size"),
    )


def _topk_method(data: Mapping[str, Any]) -> str:
    method = text(data, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"The configuration's topk_method is {method!r}; DeepSeek V2 has greedy and group_limited_greedy."
        )
    return method


def _renormalized(data: Mapping[str, Any], third: bool) -> bool:
    wanted = flag(data, "norm_topk_prob", third)
    if wanted and not third:
        # Its publishers' code does not scale such weights, llama.cpp does, and transformers ignores the setting.
        raise ModelError("The configuration's norm_topk_prob must be false in DeepSeek V2, as in all its checkpoints.")
    return wanted


def _from_gguf(c: DecoderConfig, checkpoint: Checkpoint) -> DeepseekConfig:
    data, arch = checkpoint.metadata, checkpoint.architecture
    rotary = integer(data, f"{arch}.rope.dimension_count")
    # Files with attn_kv_b name a head's own sizes; later ones name those of the cache, and these beside them.
    key = integer(data, f"{arch}.attention.key_length_mla", c.head_dim)
    value = integer(data, f"{arch}.attention.value_length", c.head_dim)
    if key <= rotary:
        raise ModelError(f"Keys of {key} dimensions, {rotary} of them rotary, leave none without position.")
    scale, rope = key**-0.5, c.rope
    prefix = f"{arch}.rope.scaling"
    if rope is not None and data.get(f"{prefix}.yarn_log_multiplier"):
        # The temperature then lies in the scale of the scores, and not in the rotary embedding.
        factor = max(positive(data, f"{prefix}.factor", 1.0), 1.0)
        rope = replace(rope, scale=positive(data, f"{prefix}.attn_factor", 1.0))
        scale *= (1 + positive(data, f"{prefix}.yarn_log_multiplier") * math.log(factor)) ** 2
    return _completed(
        gguf_experts(replace(c, rope=rope), checkpoint, renormalize=False),
        attention_scale=scale,
        q_rank=integer(data, f"{arch}.attention.q_lora_rank", 0, low=0),
        kv_rank=integer(data, f"{arch}.attention.kv_lora_rank"),
        nope=key - rotary,
        rotary=rotary,
        v_dim=integer(data, f"{arch}.attention.value_length_mla", value),
        latent_eps=c.eps,
    )


def _completed(c: DecoderConfig, **own: Any) -> DeepseekConfig:
    return DeepseekConfig(**vars(c) | {"cache": "latent"} | own)


def build(b: Builder, c: DeepseekConfig, w: Weights) -> Program:
    return pre_norm_layers(b, c, w, _attention, feed_forward)


def _attention(b: Builder, c: DeepseekConfig, w: Weights, i: int, h: Value) -> Value:
    assert c.rope is not None
    p, width = f"blk.{i}.", c.kv_rank + c.rotary
    inv_freq = b.constant("rope.inv_freq", c.rope.inv_freq)
    q_nope, q_rope = _queries(b, c, w, i, h)
    rows = {"latent": slice(0, c.kv_rank), "rope": slice(c.kv_rank, width)}
    latent, k_rope = _parts(b, w, p + "attn_kv_a_mqa", h, rows, None)
    latent = b.rms_norm(latent, w(p + "attn_kv_a_norm.weight"), c.latent_eps)
    k_rope = b.rope(k_rope, inv_freq, 1, c.rotary, c.rope.interleaved, c.rope.scale)
    b.kv_write(i, b.concat_heads(latent, k_rope, 1), None, 1, width)
    up_k, up_v = _absorbed(c, w, i)
    q_rope = b.rope(q_rope, inv_freq, c.heads, c.rotary, c.rope.interleaved, c.rope.scale)
    q = b.concat_heads(b.head_linear(q_nope, up_k, c.heads, c.kv_rank), q_rope, c.heads)
    assert c.attention_scale is not None
    a = b.attention(grown(b, c, q), i, c.heads, c.attention_scale, v_head_dim=c.kv_rank)
    a = b.head_linear(a, up_v, c.heads, c.v_dim)
    return b.linear(a, w(p + "attn_output.weight"), w.maybe(p + "attn_output.bias"), axes=("embed", "heads"))


def _queries(b: Builder, c: DeepseekConfig, w: Weights, i: int, h: Value) -> list[Value]:
    """The parts of all heads' queries without and with position: [T, heads * nope] and [T, heads * rotary]."""
    p, name = f"blk.{i}.", "attn_q"
    if c.q_rank:
        [latent] = _parts(b, w, p + "attn_q_a", h, {"latent": slice(0, c.q_rank)}, None)
        h = b.rms_norm(latent, w(p + "attn_q_a_norm.weight"), c.latent_eps)
        name = "attn_q_b"
    order = np.arange(c.heads * (c.nope + c.rotary)).reshape(c.heads, -1)
    rows = {"nope": order[:, : c.nope].reshape(-1), "rope": order[:, c.nope :].reshape(-1)}
    return _parts(b, w, p + name, h, rows, "heads")


def _parts(
    b: Builder, w: Weights, name: str, h: Value, rows: Mapping[str, slice | Array], axis: str | None
) -> list[Value]:
    """h through parts of a projection's rows, which together are all of them."""
    weight, bias = w(name + ".weight"), w.maybe(name + ".bias")
    parts = {part: select(f"{name}_{part}.weight", weight, index) for part, index in rows.items()}
    needs_rows(weight, sum(part.shape[0] for part in parts.values()))
    return [
        b.linear(h, part, None if bias is None else select(f"{name}_{key}.bias", bias, rows[key]), axes=(axis, "embed"))
        for key, part in parts.items()
    ]


def _absorbed(c: DeepseekConfig, w: Weights, i: int) -> tuple[WeightRef, WeightRef]:
    """W_UK [heads, kv_rank, nope] and W_UV [heads, v_dim, kv_rank], which later GGUF files have as such."""
    p = f"blk.{i}."
    up_k = w.maybe(p + "attn_k_b.weight")
    if up_k is not None:
        return up_k, w(p + "attn_v_b.weight")
    both, size = w(p + "attn_kv_b.weight"), c.nope + c.v_dim
    up_k_rows = of_heads(p + "attn_uk.weight", both, c.heads, size, slice(0, c.nope))
    up_v = of_heads(p + "attn_uv.weight", both, c.heads, size, slice(c.nope, size))
    return TransposedHeadWeight(p + "attn_uk.weight", up_k_rows), up_v
