"""Mixture of experts: route, the experts' linears, and the weighted sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from ..backend.v1 import Array, Dims
from ..errors import OpError
from .cases import random_activation, random_weight
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance


def moe_route(
    *,
    logits: Array,
    k: int,
    correction_bias: Array | None = None,
    expert_scale: Array | None = None,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
    group_best: int = 1,
) -> tuple[Array, Array]:
    """The k best experts of each token: ids i32 [T, k] in descending order, and weights f32 [T, k].

    logits [T, E]. ``score`` is softmax over all experts or sigmoid; the choice is by logits, lowest id on ties.
    ``renormalize`` divides the chosen scores by their sum; ``scale`` and each expert's own ``expert_scale`` [E] multiply them
    last. OpError for another score.

    ``correction_bias`` [E] is added to the scores for the choice only, which is then by these sums (DeepSeek-V3, arXiv
    2412.19437). With ``groups`` > 1 the choice is by score, too, and among the experts of ``groups_kept`` of so many
    equal groups of neighbours: those whose ``group_best`` best members have the greatest sum, lowest group on ties; k
    experts must be left (DeepSeek-V2, arXiv 2405.04434).
    """
    wide = logits.astype(np.float64)
    if score == "softmax":
        scores = np.exp(wide - wide.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    elif score == "sigmoid":
        scores = 1 / (1 + np.exp(-wide))
    else:
        raise OpError(f"moe_route has the scores softmax and sigmoid and not {score}.")
    choice = wide if correction_bias is None and groups == 1 else scores
    if correction_bias is not None:
        choice = choice + correction_bias
    if groups > 1:
        choice = _of_best_groups(choice, groups, groups_kept, group_best)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    return ids.astype(np.int32), (weights * scale).astype(np.float32)


def _of_best_groups(choice: Array, groups: int, kept: int, best: int) -> Array:
    """Minus infinity in place of what the experts outside the best groups have."""
    grouped = choice.reshape(len(choice), groups, -1)
    totals = np.sort(grouped, axis=-1)[..., -best:].sum(axis=-1)
    chosen = np.argsort(-totals, axis=-1, kind="stable")[:, :kept]
    left = np.full_like(grouped, -np.inf)
    np.put_along_axis(left, chosen[..., None], np.take_along_axis(grouped, chosen[..., None], axis=1), axis=1)
    return left.reshape(choice.shape)


def moe_linear(
    *, x: Array, ids: Array, weight: Array, bias: Array | None = None, per_choice: bool = False
) -> tuple[Array]:
    """Each token through the weight [E, N, K], plus the bias [E, N], of each of its experts ids i32 [T, k]: f32 [T * k, N].

    Row t * k + choice. x is [T, K], or [T * k, K] with ``per_choice``. One product a row. Providers may round
    x to bf16 where the weight is BF16.
    """
    tokens, choices = ids.shape
    y = np.empty((tokens * choices, weight.shape[1]), np.float32)
    for row, expert in enumerate(ids.reshape(-1)):
        y[row] = weight[expert] @ x[row if per_choice else row // choices]
        if bias is not None:
            y[row] += bias[expert]
    return (y,)


def moe_linear_group(
    *, x: Array, ids: Array, weight: Sequence[Array], bias: Sequence[Array | None] = (), per_choice: bool = False
) -> tuple[Array, ...]:
    """Several moe_linears on one x and the same ids: an output f32 [T * k, N_i] a weight. A bias that is None or beyond the
    list is absent."""
    return tuple(
        moe_linear(x=x, ids=ids, weight=w, bias=b, per_choice=per_choice)[0] for w, b in zip_longest(weight, bias)
    )


def moe_combine(*, y: Array, weights: Array) -> tuple[Array]:
    """Sum over a token's choices of weights f32 [T, k] times y [T * k, d], in order of choice: f32 [T, d]."""
    tokens, choices = weights.shape
    chosen = y.reshape(tokens, choices, y.shape[1])
    total = np.zeros((tokens, y.shape[1]), np.float32)
    for choice in range(choices):
        total += weights[:, choice, None] * chosen[:, choice]
    return (total,)


def moe_route_cases(rng: Generator) -> Iterator[Case]:
    for tokens, experts, k, attrs in (
        (1, 8, 2, {}),
        (17, 8, 2, {"renormalize": False}),
        (5, 4, 4, {}),
        (9, 60, 6, {"score": "sigmoid", "scale": 2.5}),
        (6, 1, 1, {}),
        (3, 12, 2, {}),
        (4, 128, 8, {"renormalize": True, "scale": 0.5}),
        (7, 16, 3, {"groups": 4, "groups_kept": 2, "renormalize": False, "scale": 16.0}),
        (8, 32, 6, {"groups": 8, "groups_kept": 3, "group_best": 2, "score": "sigmoid"}),
        (5, 256, 8, {"groups": 8, "groups_kept": 4, "group_best": 2, "score": "sigmoid", "scale": 2.5, "bias": True}),
        (11, 6, 2, {"score": "sigmoid", "bias": True}),
        (40, 12, 3, {"groups": 2, "groups_kept": 1, "group_best": 3, "renormalize": False}),
        (6, 20, 4, {"scaled": True}),
        (9, 16, 2, {"score": "sigmoid", "bias": True, "scaled": True, "scale": 0.5}),
    ):
        logits = rng.standard_normal((tokens, experts), np.float32) * np.float32(2)
        logits[-1] = np.round(logits[-1])  # ties
        name = f"{tokens} tokens, {k} of {experts} {attrs or ''}".strip()
        if name.startswith("3 "):
            logits += np.float32(900)  # whose exponentials overflow
        given = {"correction_bias": attrs.pop("bias", False), "expert_scale": attrs.pop("scaled", False)}
        weights = {key: random_weight(rng, "F32", (experts,), 0.2) for key, has in given.items() if has}
        yield Case(name, Dims(T=tokens), {"logits": logits}, weights, attrs={"k": k, **attrs})


def moe_linear_cases(rng: Generator) -> Iterator[Case]:
    for format_, tokens, experts, k, outputs, width, per_choice, biased in (
        ("F32", 1, 4, 2, 64, 32, False, False),
        ("F32", 13, 8, 2, 96, 64, False, True),
        ("F16", 13, 8, 2, 64, 96, True, False),
        ("BF16", 3, 2, 1, 33, 32, True, True),
        ("F32", 1, 16, 4, 40, 64, True, False),
        ("F16", 30, 3, 3, 17, 128, False, True),
    ):
        ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
        rows = tokens * k if per_choice else tokens
        weights = {"weight": random_weight(rng, format_, (experts, outputs, width))}
        if biased:
            weights["bias"] = random_weight(rng, "F32", (experts, outputs), 1.0)
        yield Case(
            f"{format_} {tokens} tokens, {k} of {experts}, {width} to {outputs}{' per choice' * per_choice}{' bias' * biased}",
            Dims(T=tokens),
            {"x": random_activation(rng, format_, (rows, width)), "ids": ids},
            weights=weights,
            attrs={"per_choice": per_choice},
        )


def moe_linear_group_cases(rng: Generator) -> Iterator[Case]:
    for tokens, experts, k, width, per_choice, members in (
        (1, 4, 2, 64, False, (("F32", 48, False), ("F32", 48, False))),
        (11, 8, 3, 32, False, (("BF16", 96, True), ("BF16", 96, False))),
        (2, 1, 1, 40, False, (("F32", 5, True),)),
        (6, 3, 2, 96, True, (("F16", 17, False), ("F32", 64, True), ("F16", 1, False))),
    ):
        ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
        weights = {f"weight.{i}": random_weight(rng, f, (experts, n, width)) for i, (f, n, _) in enumerate(members)}
        weights |= {
            f"bias.{i}": random_weight(rng, "F32", (experts, n), 1.0) for i, (_, n, b) in enumerate(members) if b
        }
        x = random_activation(rng, members[0][0], (tokens * k if per_choice else tokens, width))
        name = f"{tokens} tokens, {k} of {experts}, {len(members)} linears{' per choice' * per_choice}"
        yield Case(name, Dims(T=tokens), {"x": x, "ids": ids}, weights, attrs={"per_choice": per_choice})


def moe_combine_cases(rng: Generator) -> Iterator[Case]:
    for tokens, k, width in ((1, 2, 64), (11, 2, 96), (5, 8, 33), (3, 1, 16)):
        weights = rng.random((tokens, k), np.float32)
        inputs = {"y": rng.standard_normal((tokens * k, width), np.float32), "weights": weights}
        yield Case(f"{tokens} tokens, {k} choices, {width}", Dims(T=tokens), inputs)


SPECS = (
    OpSpec(
        "moe_route",
        inputs=("logits",),
        weights=("correction_bias?", "expert_scale?"),
        outputs=("ids", "weights"),
        attrs={
            "k": REQUIRED,
            "score": "softmax",
            "renormalize": True,
            "scale": 1.0,
            "groups": 1,
            "groups_kept": 1,
            "group_best": 1,
        },
        reference=moe_route,
        tolerance=Tolerance(1e-6, 1e-5),
        cases=moe_route_cases,
    ),
    OpSpec(
        "moe_linear",
        inputs=("x", "ids"),
        weights=("weight", "bias?"),
        outputs=("y",),
        attrs={"per_choice": False},
        reference=moe_linear,
        tolerance=Tolerance(2e-5, 2e-5),
        cases=moe_linear_cases,
    ),
    OpSpec(
        "moe_linear_group",
        inputs=("x", "ids"),
        weights=("weight*", "bias*?"),
        outputs=("y*",),
        attrs={"per_choice": False},
        reference=moe_linear_group,
        tolerance=Tolerance(2e-5, 2e-5),
        cases=moe_linear_group_cases,
    ),
    OpSpec(
        "moe_combine",
        inputs=("y", "weights"),
        outputs=("y",),
        reference=moe_combine,
        tolerance=Tolerance(1e-6, 1e-6),
        cases=moe_combine_cases,
    ),
)
