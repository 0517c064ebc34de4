"""How near a provider must come to a reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..backend.v1 import Array

_NARROW = {"f16": 2.0**-10, "bf16": 2.0**-7}
"""Two roundings to the storage type of an activation, relative."""
_BYTES_ERROR = 0.05
_SHORTS_ERROR = 2.0**-11
"""Five standard deviations of what rounding the activations of a product to 8 bits adds, relative to |x| |w| / sqrt(K)."""


@dataclass(frozen=True)
class Bound:
    """|got - want| <= absolute + relative * |want|; ``absolute`` may be an array like ``want``."""

    absolute: float | Array
    relative: float

    def stored_as(self, tag: str, size: float) -> Bound:
        """The bound for values kept as ``tag``, whose inputs are of ``size``."""
        more = _NARROW.get(tag, 0.0)
        return Bound(self.absolute + more * size, self.relative + more)


def packed_bound(x: Array, weight: Array, extra: Bound) -> Bound:
    """The bound of x [rows, K] times weight [N, K] where x may be rounded to 8 bits: an array [rows, N]."""
    sizes = np.linalg.norm(np.nan_to_num(x), axis=1)[:, None] * np.linalg.norm(weight, axis=1)[None]
    return Bound(extra.absolute + _BYTES_ERROR * sizes / np.sqrt(x.shape[1]), extra.relative)


def whole_cache_bound(values: Array, extra: Bound) -> Bound:
    """The bound of attention over a cache of whole numbers, where queries and softmax weights may be rounded to 16 bits;
    ``values`` may hold NaN. It is an eighth of what 8 bits in the cache cost."""
    return Bound(extra.absolute + _SHORTS_ERROR * float(np.nanmax(np.abs(values), initial=0.0)), extra.relative)


def close(where: str, bound: Bound, got: Array, want: Array) -> None:
    """AssertionError for the first element outside the bound. Integers must be equal, but for int8, int16, fp8 (uint8)
    and bf16, which are stored floats; NaN and infinities must be where the reference has them."""
    assert got.shape == want.shape, f"{where}: the shape is {got.shape} and should be {want.shape}."
    if want.dtype.kind in "iu" and want.dtype not in (np.uint16, np.int8, np.int16, np.uint8):
        return exactly(where, got, want)
    if want.dtype in (np.int8, np.int16):
        return _report(where, np.abs(got.astype(np.int32) - want) > 1, got, want)
    if want.dtype == np.uint8:
        a, b = (np.where(array & 0x80, -(array & 0x7F).astype(np.int32), array) for array in (got, want))
        return _report(where, np.where(want == 0x7F, a != b, np.abs(a - b) > 1), got, want)
    if want.dtype == np.uint16:
        got, want = ((a.astype(np.uint32) << 16).view(np.float32) for a in (got, want))
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.isfinite(b) & (np.abs(a - b) <= bound.absolute + bound.relative * np.abs(b))
    wrong = ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
    return _report(where, wrong, got, want)


def close_q8(where: str, bound: Bound, got: Array, want: Array) -> None:
    """Packed activations [rows, K + K/8 + K/4]: scales near, values equal but for a few that are a step
    apart, sums those of the values."""
    depth = got.shape[1] * 8 // 11
    values, others = (a[:, :depth].view(np.int8).astype(np.int32) for a in (got, want))
    wrong = values != others
    if wrong.sum() <= 2 + wrong.size // 50:
        wrong = np.abs(values - others) > 1
    _report(f"{where}: values", wrong, values, others)
    scales, wanted = (np.ascontiguousarray(a[:, depth : depth * 9 // 8]).view(np.float32) for a in (got, want))
    close(f"{where}: scales", Bound(bound.absolute / 127, bound.relative), scales, wanted)
    sums = np.ascontiguousarray(got[:, depth * 9 // 8 :]).view(np.int32)
    exactly(f"{where}: sums", sums, -values.reshape(len(got), -1, 16).sum(-1, dtype=np.int32))


def rounded_alike(where: str, got: Array, want: Array, before: Array) -> None:
    """AssertionError where more than one in fifty of the stored numbers that changed differs: rounding is to nearest, ties
    to even."""
    if want.dtype not in (np.float16, np.uint16, np.int8, np.uint8):
        return
    new = want != before
    other = np.count_nonzero(new & (got != want) & ~(np.isnan(got) & np.isnan(want)))
    if other > 2 + np.count_nonzero(new) // 50:
        raise AssertionError(
            f"{where}: {other} of {np.count_nonzero(new)} numbers are rounded otherwise than to nearest."
        )


def exactly(where: str, got: Array, want: Array) -> None:
    """The same bits; NaN equals NaN."""
    assert got.shape == want.shape, f"{where}: the shape is {got.shape} and should be {want.shape}."
    wrong = got != want
    if got.dtype.kind == "f":
        wrong &= ~(np.isnan(got) & np.isnan(want))
    _report(where, wrong, got, want)


def _report(where: str, wrong: Array, got: Array, want: Array) -> None:
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        count = int(wrong.sum())
        raise AssertionError(
            f"{where}: {count} of {wrong.size} elements are wrong, first {at}: {got[at]} for {want[at]}."
        )
