"""Gemma 4, text only: Gemma 3 with wider heads where a layer sees everything, values that are normed too, last layers
that read the cache of earlier ones, in its smaller sizes an input of its own for each layer, looked up by the token, and in
one size experts beside the feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import gemma2, gemma3
from .config import kv_heads_of
from .decoder import DecoderConfig, attend, mlp_block, moe_block, output_head
from .fields import flag, integer, positive
from .rope import Rope, base_frequencies, rope_of_kinds
from .weights import Weights

HF_KEYS = {**gemma2.HF_KEYS, "num_experts_per_tok": "top_k_experts"}
# What transformers takes where a file leaves it out (Gemma4TextConfig).
HF_DEFAULTS: Mapping[str, Any] = {
    **gemma3.HF_DEFAULTS,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}
_LAYER = "model.layers.{i}."
HF_NAMES = {
    **gemma3.HF_NAMES,
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "blk.{i}.inp_gate.weight": _LAYER + "per_layer_input_gate.weight",
    "blk.{i}.proj.weight": _LAYER + "per_layer_projection.weight",
    "blk.{i}.post_norm.weight": _LAYER + "post_per_layer_input_norm.weight",
    "blk.{i}.layer_output_scale.weight": _LAYER + "layer_scalar",
    "blk.{i}.ffn_gate_inp.weight": _LAYER + "router.proj.weight",
    "blk.{i}.ffn_gate_inp.scale": _LAYER + "router.scale",
    "blk.{i}.ffn_gate_up_exps.weight": _LAYER + "experts.gate_up_proj",
    "blk.{i}.ffn_gate_exps.weight": _LAYER + "experts.switch_glu.gate_proj.weight",  # of mlx-lm, as its up and down
    "blk.{i}.ffn_up_exps.weight": _LAYER + "experts.switch_glu.up_proj.weight",
    "blk.{i}.ffn_down_exps.weight": (_LAYER + "experts.down_proj", _LAYER + "experts.switch_glu.down_proj.weight"),
    "blk.{i}.ffn_down_exps.scale": _LAYER + "router.per_expert_scale",
    "blk.{i}.pre_ffw_norm_2.weight": _LAYER + "pre_feedforward_layernorm_2.weight",
    "blk.{i}.post_ffw_norm_1.weight": _LAYER + "post_feedforward_layernorm_1.weight",
    "blk.{i}.post_ffw_norm_2.weight": _LAYER + "post_feedforward_layernorm_2.weight",
}
_LOCAL = "_of_windows"
"""Ends the keys that ``flattened`` adds."""


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """``kv_heads`` and ``head_dim`` are those of layers that see everything. ``local_kv_heads``, ``local_head_dim``: of those
    with a window. ``readers``: as many last layers read the cache of the last layer before them of their kind. ``own_inputs``:
    the width of a layer's own input, 0 where there is none."""

    local_kv_heads: int
    local_head_dim: int
    readers: int
    own_inputs: int

    def of_layer(self, i: int) -> DecoderConfig:
        """With the heads of a layer."""
        return replace(self, kv_heads=self.local_kv_heads, head_dim=self.local_head_dim) if self.window(i) else self

    def source(self, i: int) -> int:
        """The layer whose cache a layer reads."""
        first = self.layers - self.readers
        if i < first:
            return i
        own = [n for n in range(first) if bool(self.window(n)) == bool(self.window(i))]
        if not own:
            raise ModelError(f"Layer {i} shares its keys and values with no layer of its kind before it.")
        return own[-1]


def flattened(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """A GGUF's metadata with one number where the file has one a layer: of those that see everything, and beside it of those
    with a window."""
    data, arch = dict(checkpoint.metadata), checkpoint.architecture
    windows = data.get(f"{arch}.attention.sliding_window_pattern")
    for name in ("attention.head_count_kv", "feed_forward_length"):
        key = f"{arch}.{name}"
        if not isinstance(data.get(key), (list, np.ndarray)) or not isinstance(windows, (list, np.ndarray)):
            continue
        of_layers = list(zip(windows, np.asarray(data[key]).tolist(), strict=False))
        kinds = {bool(local): number for local, number in reversed(of_layers)}
        data |= {key: kinds.get(False), key + _LOCAL: kinds.get(True)}
    return data


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> Gemma4Config:
    c = replace(
        c,
        embedding_scale=c.hidden**0.5,
        attention_scale=1.0,
        logit_softcap=gemma2.softcap(checkpoint, "final"),
    )
    return _from_gguf(c, checkpoint) if checkpoint.kind == "gguf" else _from_hf(c, checkpoint)


def _from_gguf(c: DecoderConfig, checkpoint: Checkpoint) -> Gemma4Config:
    data, p = checkpoint.metadata, f"{checkpoint.architecture}."
    local = integer(data, p + "attention.key_length_swa", c.head_dim)
    theta = positive(data, p + "rope.freq_base_swa", gemma3.LOCAL_THETA)
    rotary = integer(data, p + "rope.dimension_count_swa", local)
    if rotary > local:
        raise ModelError(f"The rotary embedding of {rotary} dimensions is wider than a head of {local}.")
    kv = p + "attention.head_count_kv"
    return Gemma4Config(
        **vars(replace(c, local_rope=Rope(base_frequencies(rotary, theta), interleaved=False))),
        local_kv_heads=kv_heads_of(data, kv if data.get(kv + _LOCAL) is None else kv + _LOCAL, c.heads),
        local_head_dim=local,
        readers=_readers(integer(data, p + "attention.shared_kv_layers", 0, low=0), c.layers),
        own_inputs=integer(data, p + "embedding_length_per_layer_input", 0, low=0),
    )


def _from_hf(c: DecoderConfig, checkpoint: Checkpoint) -> Gemma4Config:
    data = checkpoint.metadata
    if not flag(data, "enable_moe_block", False):
        c = replace(c, experts=0, experts_used=0)
    if data.get("use_bidirectional_attention") == "all":
        raise ModelError(
            f"The checkpoint {checkpoint.path} attends in both directions (use_bidirectional_attention is all), which is not"
            " supported; use a causal decoder."
        )
    head_dim, kv_heads = _heads_of_all(c, data)
    local, full = rope_of_kinds(data, c.head_dim, c.max_context, head_dim)
    return Gemma4Config(
        **vars(replace(c, head_dim=head_dim, kv_heads=kv_heads, rope=full, local_rope=local)),
        local_kv_heads=c.kv_heads,
        local_head_dim=c.head_dim,
        readers=_readers(integer(data, "num_kv_shared_layers", 0, low=0), c.layers),
        own_inputs=integer(data, "hidden_size_per_layer_input", 0, low=0),
    )


def _heads_of_all(c: DecoderConfig, data: Mapping[str, Any]) -> tuple[int, int]:
    """The width of a head, and the KV heads, of layers that see everything. Published files have keys for these, those that
    transformers writes an object of what a layer has other than the rest."""
    own: Mapping[str, Any] = {"head_dim": integer(data, "global_head_dim", 512)}
    if flag(data, "attention_k_eq_v", False) and data.get("num_global_key_value_heads") is not None:
        own = {**own, "num_key_value_heads": data["num_global_key_value_heads"]}
    given = data.get("per_layer_config")
    if given is not None:
        layer = next((i for i in range(c.layers) if not c.window(i)), 0)
        own = given.get(str(layer), {}) if isinstance(given, Mapping) else given
        if not isinstance(own, Mapping):
            raise ModelError("The configuration's per_layer_config must be an object with an object for each layer.")
    kv_heads = kv_heads_of({"num_key_value_heads": c.kv_heads, **own}, "num_key_value_heads", c.heads)
    return integer(own, "head_dim", c.head_dim), kv_heads


def _readers(count: int, layers: int) -> int:
    if count >= layers:
        raise ModelError(f"{count} of {layers} layers share the keys and values of earlier ones, which must be fewer.")
    return count


def needless(c: Gemma4Config, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Some files have keys and values for layers that read those of others."""
    names = []
    for i in range(c.layers - c.readers, c.layers):
        if checkpoint.kind == "gguf":
            names += [f"blk.{i}.attn_{part}" for part in ("k.", "v.", "k_norm.", "v_norm.")]
        else:
            names += [f"model.layers.{i}.self_attn.{part}_" for part in ("k", "v")]
    return tuple(names)


def _attention_block(b: Builder, c: Gemma4Config, w: Weights, i: int, h: Value) -> Value:
    """Without a matrix for values these are the keys, before their norm."""
    p, own, source = f"blk.{i}.attn_", c.of_layer(i), c.source(i)
    q = b.linear(h, w(p + "q.weight"), axes=("heads", "embed"))
    q = b.rms_norm(q, w(p + "q_norm.weight"), c.eps, own.head_dim)
    if source != i:
        return attend(b, own, w, i, q, None, None, source=source)
    k = b.linear(h, w(p + "k.weight"), axes=("kv_heads", "embed"))
    values = w.maybe(p + "v.weight")
    v = k if values is None else b.linear(h, values, axes=("kv_heads", "embed"))
    v = b.rms_norm(v, b.constant(f"ones.{own.head_dim}", np.ones(own.head_dim)), c.eps, own.head_dim)
    k = b.rms_norm(k, w(p + "k_norm.weight"), c.eps, own.head_dim)
    return attend(b, own, w, i, q, k, v)


def _inputs_of_layers(b: Builder, c: Gemma4Config, w: Weights, x: Value) -> Value:
    """[T, layers * own_inputs]: what the token's own table has, and a projection of its embedding, by equal parts."""
    table, width = w("per_layer_token_embd.weight"), c.own_inputs
    if table.shape[1] != c.layers * width:
        raise ModelError(
            f"{table.name} has rows of {table.shape[1]}, but {c.layers} layers with inputs of {width} need"
            f" {c.layers * width}; the checkpoint is inconsistent."
        )
    half = 0.5**0.5
    looked_up = b.embed(table, scale=width**0.5 * half)
    projected = b.linear(x, w("per_layer_model_proj.weight"))
    # The projection is scaled by 1 / sqrt(hidden) before its norm, which leaves that of the epsilon alone.
    weight = b.constant("per_layer_proj_norm.half", w("per_layer_proj_norm.weight").dense() * np.float32(half))
    return b.add(looked_up, b.rms_norm(projected, weight, c.eps * c.hidden, width))


def _own_input_block(b: Builder, c: Gemma4Config, w: Weights, i: int, x: Value, inputs: Value) -> Value:
    p, own = f"blk.{i}.", b.columns(inputs, i * c.own_inputs, (i + 1) * c.own_inputs)
    h = b.gated_act(b.linear(x, w(p + "inp_gate.weight")), own, c.act)
    return b.rms_norm(b.linear(h, w(p + "proj.weight")), w(p + "post_norm.weight"), c.eps)


def build(b: Builder, c: Gemma4Config, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"), scale=c.embedding_scale)
    inputs = _inputs_of_layers(b, c, w, x) if c.own_inputs else None
    for i in b.layers(c.layers):
        p = f"blk.{i}."
        h = _attention_block(b, c, w, i, b.rms_norm(x, w(p + "attn_norm.weight"), c.eps))
        x = b.add(x, b.rms_norm(h, w(p + "post_attention_norm.weight"), c.eps))
        h = _feed_forward(b, c, w, i, x)
        x = b.add(x, b.rms_norm(h, w(p + "post_ffw_norm.weight"), c.eps))
        if inputs is not None:
            x = b.add(x, _own_input_block(b, c, w, i, x, inputs))
        scale = w.maybe(p + "layer_output_scale.weight")
        if scale is not None:
            x = b.scaled(x, float(scale.dense().reshape(-1)[0]))
    return output_head(b, c, w, x)


def _feed_forward(b: Builder, c: Gemma4Config, w: Weights, i: int, x: Value) -> Value:
    """Beside it experts, where the model has them, each with norms of its own around it. Their router reads x normed by
    weights that are divided by the root of the width."""
    p = f"blk.{i}."
    h = mlp_block(b, c, w, i, b.rms_norm(x, w(p + "ffn_norm.weight"), c.eps), width=_width(c, w, i))
    if not c.experts:
        return h
    scale = b.constant(p + "ffn_gate_inp.norm", w(p + "ffn_gate_inp.scale").dense() / np.float32(c.hidden**0.5))
    routed = moe_block(
        b, c, w, i, b.rms_norm(x, w(p + "pre_ffw_norm_2.weight"), c.eps),
        routed_by=b.rms_norm(x, scale, c.eps), expert_scale=w(p + "ffn_down_exps.scale"),
    )  # fmt: skip
    h = b.rms_norm(h, w(p + "post_ffw_norm_1.weight"), c.eps)
    return b.add(h, b.rms_norm(routed, w(p + "post_ffw_norm_2.weight"), c.eps))


def _width(c: Gemma4Config, w: Weights, i: int) -> int:
    """Of a layer's feed-forward: some that read the cache of others are twice as wide."""
    wide = i >= c.layers - c.readers and w(f"blk.{i}.ffn_up.weight").shape[0] == 2 * c.mlp
    return 2 * c.mlp if wide else c.mlp
