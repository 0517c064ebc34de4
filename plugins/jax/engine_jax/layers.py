"""What a layer does to each row by itself: embeddings, products, norms, rotations, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from engine.backend.v1 import Call

from .given import EXACT, Function, Given, Op, Site, dot


def _embed(call: Call, site: Site) -> Function:
    scale = call.attr("scale")

    def run(given: Given) -> tuple[jax.Array, ...]:
        return (given.weights["weight"].take(given.inputs["ids"]).as_dtype(jnp.float32) * jnp.float32(scale),)

    return run


def _rounded(x: jax.Array, scale: float) -> jax.Array:
    """x to the nearest of 256 steps of ``scale``, or of the row's absmax; NaN and infinities stay."""
    step: jax.Array = jnp.float32(scale)
    if not scale:
        most = jnp.abs(x).max(axis=-1, keepdims=True)
        step = jnp.where((most > 0) & jnp.isfinite(most), most / 127.5, 1.0)
    return jnp.where(jnp.isfinite(x), jnp.clip(jnp.round(x / step), -128, 127) * step, x)


def _linear(call: Call, site: Site) -> Function:
    rounds = call.attr("quantized_activation") == "required"
    scale = call.attr("input_scale")

    def run(given: Given) -> tuple[jax.Array, ...]:
        x = _rounded(given.wide("x"), scale) if rounds else given.inputs["x"]
        y = dot(x, given.weights["weight"].dense())
        bias = given.optional("bias")
        if bias is not None:
            y = y + bias
        return (y + given.wide("residual") if "residual" in given.inputs else y,)

    return run


def _head_linear(call: Call, site: Site) -> Function:
    def run(given: Given) -> tuple[jax.Array, ...]:
        weight, x = given.vector("weight"), given.wide("x")
        parts = x.reshape(len(x), weight.shape[0], weight.shape[2])
        return (jnp.einsum("thk,hnk->thn", parts, weight, precision=EXACT).reshape(len(x), -1),)

    return run


def _concat_heads(call: Call, site: Site) -> Function:
    heads = call.attr("heads")

    def run(given: Given) -> tuple[jax.Array, ...]:
        a, b = (given.wide(name).reshape(len(given.inputs[name]), heads, -1) for name in ("a", "b"))
        return (jnp.concatenate([a, b], axis=2).reshape(len(a), -1),)

    return run


def _gather_columns(call: Call, site: Site) -> Function:
    def run(given: Given) -> tuple[jax.Array, ...]:
        return (given.wide("x")[:, given.weights["columns"].as_dtype(jnp.int32)],)

    return run


def _gather_rows(call: Call, site: Site) -> Function:
    return lambda given: (given.inputs["x"][given.inputs["rows"]],)


def _normed(x: jax.Array, weight: jax.Array, eps: float, head_dim: int, offset: float) -> jax.Array:
    slices = x.reshape(len(x), -1, head_dim or x.shape[1])
    square = jnp.mean(slices * slices, axis=-1, keepdims=True)
    scale = (weight + offset).reshape(-1, slices.shape[-1])  # of all slices, or of each
    return (slices * jax.lax.rsqrt(square + eps) * scale).reshape(x.shape)


def _rms_norm(call: Call, site: Site) -> Function:
    eps, head_dim, offset = call.attr("eps"), call.attr("head_dim"), call.attr("weight_offset")

    def run(given: Given) -> tuple[jax.Array, ...]:
        weight = given.vector("weight")
        return (_normed(given.wide("x"), weight, eps, head_dim, offset),)

    return run


def _add_rms_norm(call: Call, site: Site) -> Function:
    eps, offset = call.attr("eps"), call.attr("weight_offset")

    def run(given: Given) -> tuple[jax.Array, ...]:
        total = given.wide("x") + given.wide("residual")
        return total, _normed(total, given.vector("weight"), eps, 0, offset)

    return run


def _layer_norm(call: Call, site: Site) -> Function:
    eps, head_dim = call.attr("eps"), call.attr("head_dim")

    def run(given: Given) -> tuple[jax.Array, ...]:
        x = given.wide("x")
        slices = x.reshape(len(x), -1, head_dim or x.shape[1])
        centred = slices - slices.mean(axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        y = (centred * jax.lax.rsqrt(variance + eps)).reshape(x.shape) * given.vector("weight")
        bias = given.optional("bias")
        return (y if bias is None else y + bias,)

    return run


def _rope(call: Call, site: Site) -> Function:
    heads, head_dim, scale = call.attr("heads"), call.attr("head_dim"), call.attr("scale")
    rotary, interleaved = call.attr("rotary_dim") or head_dim, call.attr("interleaved")

    def run(given: Given) -> tuple[jax.Array, ...]:
        angles = given.inputs["positions"].astype(jnp.float32)[:, None] * given.vector("inv_freq")
        cos, sin = (f(angles)[:, None] * jnp.float32(scale) for f in (jnp.cos, jnp.sin))
        x = given.wide("x").reshape(-1, heads, head_dim)
        turned, rest = x[..., :rotary], x[..., rotary:]
        shape = (*turned.shape[:2], rotary // 2, 2) if interleaved else (*turned.shape[:2], 2, rotary // 2)
        axis = 3 if interleaved else 2
        a, b = jnp.moveaxis(turned.reshape(shape), axis, 0)
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=axis).reshape(turned.shape)
        return (jnp.concatenate([turned, rest], axis=-1).reshape(given.inputs["x"].shape),)

    return run


def _gelu(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _relu(x: jax.Array) -> jax.Array:
    return jnp.where(x < 0, 0, x)  # NaN stays


_KINDS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
    "identity": lambda x: x,
}
_CLAMPED = "clamped_swiglu"


def _gated_act(call: Call, site: Site) -> Function:
    kind, alpha, limit = call.attr("kind"), call.attr("alpha"), call.attr("limit")

    def run(given: Given) -> tuple[jax.Array, ...]:
        gate, up = given.wide("gate"), given.wide("up") if "up" in given.inputs else None
        if kind == _CLAMPED and up is not None:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            return (gate / (1 + jnp.exp(-alpha * gate)) * (up + 1),)
        y = _KINDS[kind](gate)
        return (y if up is None else y * up,)

    return run


def _known_kind(call: Call) -> str | None:
    kind = call.attr("kind")
    return None if kind in _KINDS or (kind == _CLAMPED and "up" in call.inputs) else f"jax has no activation {kind}."


def _add(call: Call, site: Site) -> Function:
    return lambda given: (given.wide("a") + given.wide("b"),)


def _scale_softcap(call: Call, site: Site) -> Function:
    scale, cap = call.attr("scale"), call.attr("softcap")

    def run(given: Given) -> tuple[jax.Array, ...]:
        x = given.wide("x") * jnp.float32(scale)
        return (cap * jnp.tanh(x / cap) if cap else x,)

    return run


OPS: Mapping[str, Op] = {
    "embed": Op(frozenset({"scale"}), _embed),
    "linear": Op(frozenset({"bias", "residual", "quantized_activation", "input_scale"}), _linear),
    "head_linear": Op(make=_head_linear),
    "concat_heads": Op(make=_concat_heads),
    "gather_columns": Op(frozenset({"chosen"}), _gather_columns),
    "gather_rows": Op(make=_gather_rows),
    "rms_norm": Op(frozenset({"head_dim", "wide_weight", "weight_offset"}), _rms_norm),
    "add_rms_norm": Op(frozenset({"weight_offset"}), _add_rms_norm),
    "layer_norm": Op(frozenset({"bias", "head_dim"}), _layer_norm),
    "rope": Op(frozenset({"rotary_dim", "interleaved", "scale"}), _rope),
    "gated_act": Op(frozenset({"up", "kind", "alpha", "limit"}), _gated_act, refuse=_known_kind),
    "add": Op(make=_add),
    "scale_softcap": Op(frozenset({"scale", "softcap"}), _scale_softcap),
}
