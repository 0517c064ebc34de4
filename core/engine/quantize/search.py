"""Searches for the scale, or scale and offset, that let whole numbers stand for a block of weights with least error.

The method is that of ggml's k-quants (I. Kawrakow, ggml-org/llama.cpp pull request 1684): for each of a grid of trial scales
round the weights, solve for the scale (and offset) that fits the rounded numbers by weighted least squares, and keep the best.
Blocks are columns, so that every step is one operation over contiguous rows for all blocks together. All arrays are f32:
``x`` [elements, blocks], ``weight`` of the same shape or None for 1, results [blocks].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.formats.quantformats import Floats


@dataclass(frozen=True)
class Fit:
    """``scale`` and ``offset`` (x is about scale * level + offset), and the weighted sum of squares of the levels, which says
    how much an error of the scale costs."""

    scale: Floats
    offset: Floats
    squares: Floats


SMALLEST = np.float32(1e-30)
"""No scale in f16 makes anything of smaller weights, and what is divided by them may overflow."""


def quotients(x: Floats, divisor: Floats) -> Floats:
    """x times the inverse of ``divisor``, and 0 where that is 0; both are larger by a power of two where the inverse would
    overflow."""
    small = np.abs(divisor) < SMALLEST
    if small.any():
        larger = np.where(small, np.float32(2.0**100), np.float32(1))
        x, divisor = x * larger, divisor * larger
    return x * np.divide(1, divisor, out=np.zeros_like(divisor), where=divisor != 0)


def levels(x: Floats, scale: Floats, low: int, high: int, out: Floats | None = None) -> Floats:
    """The whole numbers of low..high nearest to x / scale; 0 where the scale is next to nothing."""
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=np.abs(scale) > SMALLEST)
    out = np.multiply(x, inverse, out=out)
    np.rint(out, out=out)
    return np.clip(out, low, high, out=out)


def fit_scale(x: Floats, weight: Floats | None, low: int, high: int, trials: Floats) -> Fit:
    """x as scale * level with levels low..high. ``trials``: the levels, whole or not, that a block's largest weight is tried
    on; for levels of both signs the largest has the sign of ``low``, which reaches further."""
    top, bottom = x.max(axis=0), x.min(axis=0)
    extreme = np.where(top > -bottom, top, bottom)
    extreme = np.where(np.abs(extreme) > SMALLEST, extreme, 1)
    weighted = x if weight is None else x * weight
    level, product = np.empty_like(x), np.empty_like(x)
    best = np.zeros((3, x.shape[1]), np.float32)  # gain, scale, squares
    for trial in trials:
        np.multiply(x, np.float32(trial) / extreme, out=level)
        np.rint(level, out=level)
        np.clip(level, low, high, out=level)
        _keep_scale(best, level, weighted, weight, product)
    return Fit(best[1], np.zeros_like(best[1]), best[2])


def _keep_scale(best: Floats, level: Floats, weighted: Floats, weight: Floats | None, product: Floats) -> None:
    cross, squares = _sum(level, weighted, product), _squares(level, weight, product)
    scale = np.divide(cross, squares, out=np.zeros_like(cross), where=squares > 0)
    found = np.stack([cross * scale, scale, squares])
    np.copyto(best, found, where=found[0] > best[0])


def fit_affine(x: Floats, weight: Floats | None, high: int, trials: Floats, signed: bool) -> Fit:
    """x as scale * level + offset with levels 0..high. ``trials``: the levels that the span of a block is tried on; ``signed``:
    whether the offset may be above 0."""
    lowest = x.min(axis=0)
    if not signed:
        lowest = np.minimum(lowest, 0)
    span = x.max(axis=0) - lowest
    inverse = np.divide(1, span, out=np.zeros_like(span), where=span > SMALLEST)
    sums = _Sums.of(x, weight)
    level, product, above = np.empty_like(x), np.empty_like(x), x - lowest
    best = np.zeros((4, x.shape[1]), np.float32)  # gain, scale, offset, squares
    best[0] = -np.inf
    for trial in trials:
        np.multiply(above, np.float32(trial) * inverse, out=level)
        np.rint(level, out=level)
        np.minimum(level, np.float32(high), out=level)
        _keep_affine(best, sums, level, weight, product, signed)
    for _ in range(REFINEMENTS):
        np.subtract(x, best[2], out=above)
        levels(above, best[1], 0, high, out=level)
        _keep_affine(best, sums, level, weight, product, signed)
    return Fit(best[1], best[2], best[3])


REFINEMENTS = 2
"""How often the best fit's levels are rounded anew and fitted again."""


@dataclass(frozen=True)
class _Sums:
    """The sums over a block that do not depend on its levels: of the weights, of weight times x."""

    weights: Floats
    x: Floats
    weighted: Floats

    @staticmethod
    def of(x: Floats, weight: Floats | None) -> _Sums:
        if weight is None:
            return _Sums(np.full(x.shape[1], len(x), np.float32), x.sum(axis=0), x)
        weighted = x * weight
        return _Sums(weight.sum(axis=0), weighted.sum(axis=0), weighted)


def _keep_affine(
    best: Floats, sums: _Sums, level: Floats, weight: Floats | None, product: Floats, signed: bool
) -> None:
    cross, squares = _sum(level, sums.weighted, product), _squares(level, weight, product)
    total = level.sum(axis=0) if weight is None else _sum(level, weight, product)
    determinant = sums.weights * squares - total * total
    solvable = determinant > 1e-6 * sums.weights * squares
    divisor = np.where(solvable, determinant, 1)
    scale = np.where(solvable, (sums.weights * cross - sums.x * total) / divisor, 0)
    offset = np.where(solvable, (squares * sums.x - total * cross) / divisor, sums.x / sums.weights)
    if not signed:
        clamped = offset > 0
        alone = np.divide(cross, squares, out=np.zeros_like(cross), where=squares > 0)
        offset, scale = np.where(clamped, 0, offset), np.where(clamped, alone, scale)
    gain = np.where(scale >= 0, scale * cross + offset * sums.x, -np.inf)
    found = np.stack([gain, scale, offset, squares]).astype(np.float32, copy=False)
    np.copyto(best, found, where=found[0] > best[0])


def _sum(a: Floats, b: Floats, product: Floats) -> Floats:
    total: Floats = np.multiply(a, b, out=product).sum(axis=0)
    return total


def _squares(level: Floats, weight: Floats | None, product: Floats) -> Floats:
    np.multiply(level, level, out=product)
    if weight is not None:
        np.multiply(product, weight, out=product)
    total: Floats = product.sum(axis=0)
    return total
