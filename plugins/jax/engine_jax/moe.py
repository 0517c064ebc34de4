"""Mixture of experts: routing, the experts' products, and the weighted sum."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from engine.backend.v1 import Call

from .given import Function, Given, Op, Site, dot
from .weights import Weight


def _moe_route(call: Call, site: Site) -> Function:
    k, score, scale = call.attr("k"), call.attr("score"), call.attr("scale")
    renormalize, groups = call.attr("renormalize"), call.attr("groups")
    kept, best = call.attr("groups_kept"), call.attr("group_best")

    def run(given: Given) -> tuple[jax.Array, ...]:
        logits, bias, own = given.wide("logits"), given.optional("correction_bias"), given.optional("expert_scale")
        scores = jax.nn.softmax(logits, axis=-1) if score == "softmax" else 1 / (1 + jnp.exp(-logits))
        choice = logits if bias is None and groups == 1 else scores
        if bias is not None:
            choice = choice + bias
        if groups > 1:
            choice = _of_best_groups(choice, groups, kept, best)
        ids = jnp.argsort(-choice, axis=-1, stable=True)[:, :k]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if renormalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return ids.astype(jnp.int32), (weights if own is None else weights * own[ids]) * scale

    return run


def _of_best_groups(choice: jax.Array, groups: int, kept: int, best: int) -> jax.Array:
    """Minus infinity in place of what the experts outside of the best groups have."""
    grouped = choice.reshape(len(choice), groups, -1)
    totals = jnp.sort(grouped, axis=-1)[..., -best:].sum(axis=-1)
    rank = jnp.argsort(jnp.argsort(-totals, axis=-1, stable=True), axis=-1)
    return jnp.where((rank < kept)[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _known_score(call: Call) -> str | None:
    score = call.attr("score")
    return None if score in ("softmax", "sigmoid") else f"jax has no score {score} for experts."


def _moe_linear(call: Call, site: Site) -> Function:
    per_choice = call.attr("per_choice")

    def run(given: Given) -> tuple[jax.Array, ...]:
        ids, weight = given.inputs["ids"], given.weights["weight"]
        x = given.inputs["x"] if per_choice else jnp.repeat(given.inputs["x"], ids.shape[1], axis=0)
        experts, bias = ids.reshape(-1), given.optional("bias")
        few = len(experts) <= len(weight.codes)
        y = _row_by_row(x, experts, weight) if few else _expert_by_expert(x, experts, weight)
        return (y if bias is None else y + bias[experts],)

    return run


def _row_by_row(x: jax.Array, experts: jax.Array, weight: Weight) -> jax.Array:
    """Each row with its own expert's matrix: the fewest bytes where there are fewer rows than experts."""
    return jax.lax.map(lambda work: dot(work[0][None], weight.take(work[1]).dense())[0], (x, experts))


def _expert_by_expert(x: jax.Array, experts: jax.Array, weight: Weight) -> jax.Array:
    """All rows with each expert's matrix, of which each row's own is kept."""

    def one(y: jax.Array, work: tuple[jax.Array, Weight]) -> tuple[jax.Array, None]:
        expert, matrix = work
        return jnp.where((experts == expert)[:, None], dot(x, matrix.dense()), y), None

    empty = jnp.zeros((len(x), weight.codes.shape[1]), jnp.float32)
    return jax.lax.scan(one, empty, (jnp.arange(len(weight.codes)), weight))[0]


def _moe_combine(call: Call, site: Site) -> Function:
    def run(given: Given) -> tuple[jax.Array, ...]:
        weights = given.wide("weights")
        y = given.wide("y").reshape(*weights.shape, -1)
        total = jnp.zeros((len(y), y.shape[2]), jnp.float32)
        for choice in range(weights.shape[1]):
            total = total + weights[:, choice, None] * y[:, choice]
        return (total,)

    return run


_ROUTE = frozenset(
    {"correction_bias", "expert_scale", "score", "renormalize", "scale", "groups", "groups_kept", "group_best"}
)
OPS: Mapping[str, Op] = {
    "moe_route": Op(_ROUTE, _moe_route, refuse=_known_score),
    "moe_linear": Op(frozenset({"bias", "per_choice"}), _moe_linear),
    "moe_combine": Op(make=_moe_combine),
}
