"""Matrices: embed, linear, head_linear, and the linears of experts."""

from __future__ import annotations

import mlx.core as mx

from ..kernels.launches import dense_rows
from ..operands import Operands
from ..weights import Affine, Dense
from .order import best_first

SORTED = 64
"""From so many choices on rows are sorted by expert, so that each expert's matrix is read once."""

FEW = 8
"""Up to so many rows take 16-bit weights as they are; for more a matrix is widened once."""


def embed(o: Operands) -> tuple[mx.array, ...]:
    y = o.weight("weight").rows(o["ids"])
    return (y if o.attr("scale") == 1 else y * o.attr("scale"),)


def gather_columns(o: Operands) -> tuple[mx.array, ...]:
    return (o.wide("x")[:, o.vector("columns").astype(mx.int32)],)


def linear(o: Operands) -> tuple[mx.array, ...]:
    y = _product(o, o.weight("weight"), _activation(o))
    if o.has("bias"):
        y = y + o.vector("bias")
    return (y + o.wide("residual") if o.has("residual") else y,)


def linear_group(o: Operands) -> tuple[mx.array, ...]:
    x = _activation(o)
    products = [_product(o, weight, x) for weight in o.family("weight")]
    return tuple(
        y if bias is None else y + bias.array.astype(mx.float32)
        for y, bias in zip(products, o.family("bias"), strict=True)
    )


def _product(o: Operands, weight: Affine | Dense, x: mx.array) -> mx.array:
    if o.kernels is not None and isinstance(weight, Dense) and weight.array.dtype != mx.float32 and len(x) <= FEW:
        return dense_rows(x, weight.array, o.kernels)
    return weight.times(x)


def _activation(o: Operands) -> mx.array:
    """x, rounded to 256 steps of the given scale, or of the row's own, where 8-bit activations are required."""
    x = o.wide("x")
    if o.attr("quantized_activation") != "required":
        return x
    step = mx.array(o.attr("input_scale"), mx.float32)
    if not o.attr("input_scale"):
        most = mx.abs(x).max(axis=-1, keepdims=True)
        step = mx.where((most > 0) & mx.isfinite(most), most / 127.5, 1.0)
    return mx.where(mx.isfinite(x), mx.clip(mx.round(x / step), -128, 127) * step, x)


def head_linear(o: Operands) -> tuple[mx.array, ...]:
    x, heads = o.wide("x"), o.bound.call.weights["weight"].shape[0]
    y = o.weight("weight").times(x.reshape(len(x), heads, -1).swapaxes(0, 1))
    return (y.swapaxes(0, 1).reshape(len(x), -1),)


def concat_heads(o: Operands) -> tuple[mx.array, ...]:
    parts = [part.reshape(len(part), o.attr("heads"), -1) for part in (o.wide("a"), o.wide("b"))]
    return (mx.concatenate(parts, axis=2).reshape(len(parts[0]), -1),)


def moe_linear(o: Operands) -> tuple[mx.array, ...]:
    return (_experts(o, o.weight("weight"), o.weight("bias") if o.has("bias") else None),)


def moe_linear_group(o: Operands) -> tuple[mx.array, ...]:
    members = zip(o.family("weight"), o.family("bias"), strict=True)
    return tuple(_experts(o, weight, bias) for weight, bias in members)


def _experts(o: Operands, weight: Affine | Dense, bias: Dense | None) -> mx.array:
    x, ids = o.wide("x"), o["ids"].reshape(-1)
    rows = mx.arange(ids.size) // (1 if o.attr("per_choice") else o["ids"].shape[1])
    if ids.size < SORTED:
        y = weight.of_experts(x[rows, None], ids)
    else:
        order = mx.argsort(ids)
        y = weight.of_experts(x[rows[order], None], ids[order], in_order=True)[mx.argsort(order)]
    return y[:, 0] if bias is None else y[:, 0] + bias.array.astype(mx.float32)[ids]


def moe_route(o: Operands) -> tuple[mx.array, ...]:
    logits = o.wide("logits")
    softmax = o.attr("score") == "softmax"
    scores = mx.softmax(logits, axis=-1, precise=True) if softmax else mx.sigmoid(logits)
    choice = logits if not o.has("correction_bias") and o.attr("groups") == 1 else scores
    if o.has("correction_bias"):
        choice = choice + o.vector("correction_bias")
    if o.attr("groups") > 1:
        choice = _of_best_groups(choice, o.attr("groups"), o.attr("groups_kept"), o.attr("group_best"))
    ids = best_first(choice)[:, : o.attr("k")]
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if o.attr("renormalize"):
        weights = weights / weights.sum(axis=-1, keepdims=True)
    if o.has("expert_scale"):
        weights = weights * o.vector("expert_scale")[ids]
    return ids.astype(mx.int32), weights * o.attr("scale")


def _of_best_groups(choice: mx.array, groups: int, kept: int, best: int) -> mx.array:
    grouped = choice.reshape(len(choice), groups, -1)
    totals = mx.sort(grouped, axis=-1)[..., -best:].sum(axis=-1)
    chosen = best_first(totals)[:, :kept]
    wanted = (chosen[:, :, None] == mx.arange(groups)).any(axis=1)
    return mx.where(wanted[..., None], grouped, -mx.inf).reshape(choice.shape)


def moe_combine(o: Operands) -> tuple[mx.array, ...]:
    weights, y = o.wide("weights"), o.wide("y")
    chosen = y.reshape(*weights.shape, y.shape[1])
    total = mx.zeros_like(chosen[:, 0])
    for choice in range(weights.shape[1]):
        total = total + weights[:, choice, None] * chosen[:, choice]
    return (total,)
