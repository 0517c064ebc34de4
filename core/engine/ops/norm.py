"""Normalizations. Statistics are f64 here and at least f32 in every provider. Where ``packed`` names a layout, a packed
activation of the normed rows is a further output: what ``quantize`` gives of them, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..backend.v1 import Array, Dims
from .cases import random_weight
from .dense import and_packed
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance


def rms_norm(
    *,
    x: Array,
    weight: Array,
    eps: float,
    head_dim: int = 0,
    wide_weight: bool = False,
    weight_offset: float = 0.0,
    packed: str = "",
) -> tuple[Array, ...]:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset), f32 in the shape of x [rows, d].

    ``head_dim`` 0: over the whole row, weight [d]; else over each slice of head_dim by itself, weight [head_dim], or [d] where it
    is ``wide_weight``.
    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """
    slices = x.astype(np.float64).reshape(len(x), -1, head_dim or x.shape[1])
    mean_square = np.mean(slices * slices, axis=-1, keepdims=True)
    scale = weight.astype(np.float64) + weight_offset
    y = slices / np.sqrt(mean_square + eps) * (scale.reshape(slices.shape[1:]) if wide_weight else scale)
    return and_packed(y.astype(np.float32).reshape(x.shape), packed)


def layer_norm(
    *, x: Array, weight: Array, eps: float, bias: Array | None = None, head_dim: int = 0, packed: str = ""
) -> tuple[Array, ...]:
    """(x - mean) / sqrt(variance + eps) * weight + bias, f32 in the shape of x [rows, d]; weight and bias [d].

    ``head_dim`` 0: mean and variance of the whole row; else of each slice of head_dim by itself. Source: Ba, Kiros and
    Hinton, "Layer normalization" (2016).
    """
    wide = x.astype(np.float64).reshape(len(x), -1, head_dim or x.shape[1])
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    y = (centred / np.sqrt(variance + eps)).reshape(x.shape) * weight
    if bias is not None:
        y = y + bias
    return and_packed(y.astype(np.float32), packed)


def add_rms_norm(
    *, x: Array, residual: Array, weight: Array, eps: float, weight_offset: float = 0.0, packed: str = ""
) -> tuple[Array, ...]:
    """add, then rms_norm of the sum: (sum, normed), f32 [rows, d] each."""
    total = (x + residual).astype(np.float32)
    return total, *rms_norm(x=total, weight=weight, eps=eps, weight_offset=weight_offset, packed=packed)


def rms_norm_cases(rng: Generator) -> Iterator[Case]:
    for rows, width, head_dim, wide, offset, eps, packed in (
        (1, 64, 0, False, 0.0, 1e-5, ""),
        (7, 288, 0, False, 0.0, 1e-6, ""),
        (5, 96, 0, False, 1.0, 1e-6, "q8g32"),
        (12, 256, 64, False, 0.0, 1e-6, ""),
        (1, 48, 16, False, 0.0, 1e-5, ""),
        (3, 1024, 128, False, 1.0, 1e-6, ""),
        (9, 1056, 0, False, 0.0, 1e-6, "q8g32"),
        (8, 640, 0, False, 0.0, 1e-6, "q8g128"),
        (5, 120, 24, True, 0.0, 1e-5, ""),
        (2, 512, 128, True, 1.0, 1e-5, ""),
    ):
        x = _rows(rng, rows, width)
        x[0] *= 0 if rows > 5 else 1  # a row of zeros: eps alone is left
        weights = {"weight": random_weight(rng, "F32", (width if wide else head_dim or width,), 1.0)}
        attrs = {"eps": eps, "head_dim": head_dim, "wide_weight": wide, "weight_offset": offset, "packed": packed}
        name = f"{rows}x{width}, slices of {head_dim or width}{', a wide weight' * wide} {packed}"
        yield Case(name, Dims(T=rows), {"x": x}, weights, attrs=attrs)


def layer_norm_cases(rng: Generator) -> Iterator[Case]:
    for rows, width, head_dim, biased, packed in (
        (1, 64, 0, True, ""),
        (6, 768, 0, True, "q8g32"),
        (9, 40, 0, False, ""),
        (2, 8, 0, True, ""),
        (17, 288, 0, False, "q8g32"),
        (4, 384, 0, True, "q8g128"),
        (5, 120, 24, False, ""),
        (3, 512, 128, True, ""),
    ):
        weights = {"weight": random_weight(rng, "F32", (width,), 1.0)}
        if biased:
            weights["bias"] = random_weight(rng, "F32", (width,), 1.0)
        x = _rows(rng, rows, width)
        # Far from zero by a row's own size: of a small row far away an f32 mean leaves nothing to compare.
        inputs = {"x": x + 2 * np.abs(x).max(axis=1, keepdims=True)}
        attrs = {"eps": 1e-5, "head_dim": head_dim, "packed": packed}
        name = f"{rows}x{width}, slices of {head_dim or width}{' bias' * biased} {packed}"
        yield Case(name, Dims(T=rows), inputs, weights, attrs=attrs)


def add_rms_norm_cases(rng: Generator) -> Iterator[Case]:
    for rows, width, offset, packed in (
        (1, 64, 0.0, ""),
        (6, 288, 0.0, "q8g32"),
        (3, 96, 1.0, ""),
        (20, 32, 0.0, ""),
        (2, 1024, 1.0, "q8g32"),
        (5, 256, 0.0, "q8g128"),
    ):
        weights = {"weight": random_weight(rng, "F32", (width,), 1.0)}
        inputs = {"x": _rows(rng, rows, width), "residual": _rows(rng, rows, width)}
        attrs = {"eps": 1e-5, "weight_offset": offset, "packed": packed}
        yield Case(f"{rows}x{width}, offset {offset} {packed}", Dims(T=rows), inputs, weights, attrs=attrs)


def _rows(rng: Generator, rows: int, width: int) -> Array:
    """Rows of very different sizes."""
    return rng.standard_normal((rows, width), np.float32) * rng.lognormal(0, 2, (rows, 1)).astype(np.float32)


SPECS = (
    OpSpec(
        "rms_norm",
        inputs=("x",),
        weights=("weight",),
        outputs=("y", "packed?"),
        attrs={"eps": REQUIRED, "head_dim": 0, "wide_weight": False, "weight_offset": 0.0, "packed": ""},
        reference=rms_norm,
        tolerance=Tolerance(1e-5, 1e-5),
        cases=rms_norm_cases,
    ),
    OpSpec(
        "layer_norm",
        inputs=("x",),
        weights=("weight", "bias?"),
        outputs=("y", "packed?"),
        attrs={"eps": REQUIRED, "head_dim": 0, "packed": ""},
        reference=layer_norm,
        tolerance=Tolerance(2e-4, 2e-5),  # an f32 mean of rows far from zero
        cases=layer_norm_cases,
    ),
    OpSpec(
        "add_rms_norm",
        inputs=("x", "residual"),
        weights=("weight",),
        outputs=("sum", "normed", "packed?"),
        attrs={"eps": REQUIRED, "weight_offset": 0.0, "packed": ""},
        reference=add_rms_norm,
        tolerance=Tolerance(1e-5, 1e-5),
        cases=add_rms_norm_cases,
    ),
)
