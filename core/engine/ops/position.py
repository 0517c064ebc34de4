"""Rotary position embedding: Su et al., "RoFormer" (2021)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..backend.v1 import Array, Dims
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance


def rope(
    *,
    x: Array,
    positions: Array,
    inv_freq: Array,
    heads: int,
    head_dim: int,
    rotary_dim: int = 0,
    interleaved: bool = False,
    scale: float = 1.0,
) -> tuple[Array]:
    """Rotates pairs of the first rotary_dim (0: head_dim) elements of each head of x [T, heads * head_dim]; f32.

    The angle of pair i is f32(position) * inv_freq[i], an f32 product as models are trained with. ``interleaved``:
    pairs (2i, 2i + 1), else (i, i + rotary_dim / 2). ``scale`` multiplies cosine and sine.
    """
    rotary = rotary_dim or head_dim
    angles = (positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)).astype(np.float64)
    cos = (np.cos(angles) * scale).astype(np.float32)[:, None, :]
    sin = (np.sin(angles) * scale).astype(np.float32)[:, None, :]
    y = x.astype(np.float32).reshape(len(x), heads, head_dim)  # astype copies
    if interleaved:
        first, second = slice(0, rotary, 2), slice(1, rotary, 2)
    else:
        first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first] = a * cos - b * sin
    y[..., second] = b * cos + a * sin
    return (y.reshape(x.shape),)


def rope_cases(rng: Generator) -> Iterator[Case]:
    for tokens, heads, head_dim, rotary_dim, interleaved, scale in (
        (1, 1, 64, 0, False, 1.0),
        (9, 8, 48, 0, False, 1.0),
        (17, 4, 64, 0, True, 1.0),
        (5, 2, 80, 32, False, 1.0),
        (6, 3, 64, 16, True, 1.25),
        (33, 8, 8, 0, True, 1.0),
    ):
        rotary = rotary_dim or head_dim
        inv_freq = (10000.0 ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32)
        positions = rng.integers(0, 3000, tokens, dtype=np.int32)
        positions[0] = 0
        yield Case(
            f"{tokens} tokens, {heads}x{head_dim}, rotary {rotary}{' interleaved' * interleaved}",
            Dims(T=tokens),
            {"x": rng.standard_normal((tokens, heads * head_dim), np.float32), "positions": positions},
            weights={"inv_freq": ("F32", inv_freq.view(np.uint8)[None], inv_freq.shape)},
            attrs={
                "heads": heads,
                "head_dim": head_dim,
                "rotary_dim": rotary_dim,
                "interleaved": interleaved,
                "scale": scale,
            },
        )


SPECS = (
    OpSpec(
        "rope",
        inputs=("x", "positions"),
        weights=("inv_freq",),
        outputs=("y",),
        attrs={
            "heads": REQUIRED,
            "head_dim": REQUIRED,
            "rotary_dim": 0,
            "interleaved": False,
            "scale": 1.0,
        },
        reference=rope,
        tolerance=Tolerance(2e-5, 2e-5),
        cases=rope_cases,
    ),
)
