"""What is done to rows or elements by themselves: norms, rope, activations, sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import mlx.core as mx

from ..operands import Operands


def rms_norm(o: Operands) -> tuple[mx.array, ...]:
    x = o.wide("x")
    slices = x.reshape(len(x), -1, o.attr("head_dim") or x.shape[1])
    if o.attr("wide_weight"):
        normed = mx.fast.rms_norm(slices, None, o.attr("eps")).reshape(x.shape)
        return (normed * (o.vector("weight") + o.attr("weight_offset")),)
    return (_rms(slices, o.vector("weight"), o.attr("weight_offset"), o.attr("eps")).reshape(x.shape),)


def add_rms_norm(o: Operands) -> tuple[mx.array, ...]:
    total = o.wide("x") + o.wide("residual")
    return total, _rms(total, o.vector("weight"), o.attr("weight_offset"), o.attr("eps"))


def _rms(x: mx.array, weight: mx.array, offset: float, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight + offset if offset else weight, eps)


def layer_norm(o: Operands) -> tuple[mx.array, ...]:
    x = o.wide("x")
    slices = x.reshape(len(x), -1, o.attr("head_dim") or x.shape[1])
    # Centred before: an f32 variance about a mean far from zero loses digits.
    centred = slices - slices.mean(axis=-1, keepdims=True)
    y = mx.fast.layer_norm(centred, None, None, o.attr("eps")).reshape(x.shape) * o.vector("weight")
    return (y + o.vector("bias") if o.has("bias") else y,)


def rope(o: Operands) -> tuple[mx.array, ...]:
    return (turned(o, o.wide("x"), o.attr("heads")),)


def turned(o: Operands, x: mx.array, heads: int) -> mx.array:
    """x [T, heads * head_dim] with the pairs of its heads turned by their positions."""
    rotary = o.attr("rotary_dim") or o.attr("head_dim")
    angles = (o["positions"].astype(mx.float32)[:, None] * o.vector("inv_freq"))[:, None, :]
    cos, sin = mx.cos(angles) * o.attr("scale"), mx.sin(angles) * o.attr("scale")
    y = x.reshape(len(x), heads, o.attr("head_dim"))
    head, rest = y[..., :rotary], y[..., rotary:]
    if o.attr("interleaved"):
        a, b = head[..., ::2], head[..., 1::2]
        head = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(head.shape)
    else:
        a, b = head[..., : rotary // 2], head[..., rotary // 2 :]
        head = mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return mx.concatenate([head, rest], axis=-1).reshape(x.shape)


def _gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))


def _gelu_tanh(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "sigmoid": mx.sigmoid,
    "identity": lambda x: x,
}
CLAMPED = "clamped_swiglu"


def gated_act(o: Operands) -> tuple[mx.array, ...]:
    gate = o.wide("gate")
    if o.attr("kind") == CLAMPED:
        limit = o.attr("limit")
        gate, up = mx.minimum(gate, limit), mx.clip(o.wide("up"), -limit, limit)
        return (gate * mx.sigmoid(o.attr("alpha") * gate) * (up + 1),)
    y = ACTIVATIONS[o.attr("kind")](gate)
    return (y * o.wide("up") if o.has("up") else y,)


def add(o: Operands) -> tuple[mx.array, ...]:
    return (o.wide("a") + o.wide("b"),)


def scale_softcap(o: Operands) -> tuple[mx.array, ...]:
    y, cap = o.wide("x") * o.attr("scale"), o.attr("softcap")
    return (cap * mx.tanh(y / cap) if cap else y,)


def gather_rows(o: Operands) -> tuple[mx.array, ...]:
    return (o["x"][o["rows"]],)


def rms_normed(o: Operands, x: mx.array, weight: str) -> mx.array:
    """The heads of x [T, heads * head_dim] normed, each by itself."""
    slices = x.reshape(len(x), -1, o.attr("head_dim"))
    return _rms(slices, o.vector(weight), o.attr("weight_offset"), o.attr("eps")).reshape(x.shape)
