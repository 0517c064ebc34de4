"""Ops on each head of a row by itself: head_linear and concat_heads, with which latent attention is absorbed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..backend.v1 import Array, Dims
from .cases import random_activation, random_weight
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance


def head_linear(*, x: Array, weight: Array) -> tuple[Array]:
    """Each head of x [T, heads * K] through its own matrix of the weight [heads, N, K], transposed: f32 [T, heads * N].

    Providers may pack x to 8 bits where the weight is quantized, and to bf16 where it is BF16; this reference computes
    in f32. One product a row and head.
    """
    heads, columns, depth = weight.shape
    y = np.empty((len(x), heads, columns), np.float32)
    for row, parts in zip(y, x.reshape(len(x), heads, depth), strict=True):
        for head in range(heads):
            row[head] = weight[head] @ parts[head]
    return (y.reshape(len(x), heads * columns),)


def concat_heads(*, a: Array, b: Array, heads: int) -> tuple[Array]:
    """Head by head, a [T, heads * A] and then b [T, heads * B]: f32 [T, heads * (A + B)]."""
    parts = [array.astype(np.float32).reshape(len(array), heads, -1) for array in (a, b)]
    return (np.concatenate(parts, axis=2).reshape(len(a), -1),)


def head_linear_cases(rng: Generator) -> Iterator[Case]:
    for format_, tokens, heads, outputs, width in (
        ("F32", 1, 4, 32, 16),
        ("F32", 9, 3, 17, 24),
        ("F16", 30, 2, 128, 64),
        ("BF16", 5, 16, 64, 33),
        ("F32", 70, 1, 8, 40),
        ("BF16", 2, 8, 512, 128),
    ):
        yield Case(
            f"{format_} {tokens} tokens, {heads} heads, {width} to {outputs}",
            Dims(T=tokens),
            {"x": random_activation(rng, format_, (tokens, heads * width))},
            weights={"weight": random_weight(rng, format_, (heads, outputs, width))},
        )


def concat_heads_cases(rng: Generator) -> Iterator[Case]:
    for tokens, heads, a, b in ((1, 1, 512, 64), (7, 4, 24, 8), (3, 16, 33, 5), (20, 2, 1, 40)):
        inputs = {name: rng.standard_normal((tokens, heads * n), np.float32) for name, n in (("a", a), ("b", b))}
        yield Case(f"{tokens} tokens, {heads} heads, {a} and {b}", Dims(T=tokens), inputs, attrs={"heads": heads})


SPECS = (
    OpSpec(
        "head_linear",
        inputs=("x",),
        weights=("weight",),
        outputs=("y",),
        reference=head_linear,
        tolerance=Tolerance(2e-5, 2e-5),
        cases=head_linear_cases,
    ),
    OpSpec(
        "concat_heads",
        inputs=("a", "b"),
        outputs=("y",),
        attrs={"heads": REQUIRED},
        reference=concat_heads,
        tolerance=Tolerance(0.0, 0.0),
        cases=concat_heads_cases,
    ),
)
