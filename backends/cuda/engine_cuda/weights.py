"""Packed weights: matrices as codes with factors, and dense arrays as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np
import torch

from engine.backend.v1 import Array, Packed, WeightRef

from .arrays import from_host, to_host
from .repack import REPACKED, TILE, Form, Parts, packed_codes, plain_codes, tiled, untiled
from .tiles import multiplies_fp8

STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
CHUNK = 1 << 22
"""Numbers of a matrix that are repacked at a time."""
WHOLE_ROW = 1 << 30
"""The group of a matrix that has one scale a row."""
FP8_GROUP = 128
"""Columns that share a scale in a matrix of E4M3 with scales of blocks."""


@dataclass(frozen=True)
class Dense:
    """Numbers as they are stored, f32, f16 or bf16, [..., N, K]."""

    array: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def decoded(self) -> Array:
        return to_host(self.array.to(torch.float32))


@dataclass(frozen=True)
class Coded:
    """A matrix [..., N, K] as ``repack`` has it: rows of bytes, and rows of factors beside them. With ``one_scale`` a row has
    a single factor, as products of bytes need it, and codes that are not E4M3 are int8. ``together``: how codes lie, as
    ``repack.packed_codes`` says; where that is in tiles, each matrix has whole ones, and factors lie so, too."""

    form: Form
    shape: tuple[int, ...]
    codes: torch.Tensor
    scale: torch.Tensor
    fine_scale: torch.Tensor | None
    least: torch.Tensor | None
    fine_least: torch.Tensor | None
    table: torch.Tensor | None
    together: int = 0

    @property
    def one_scale(self) -> bool:
        return self.form.super == WHOLE_ROW

    @property
    def multiplies_fp8(self) -> bool:
        """Whether the codes are E4M3, with scales of so many columns that they stay outside of products of E4M3."""
        return self.form.e4m3 and self.form.super in (FP8_GROUP, WHOLE_ROW)

    @property
    def rows(self) -> tuple[torch.Tensor | None, ...]:
        """What there is of each row, or of each tile."""
        return self.codes, self.scale, self.fine_scale, self.least, self.fine_least

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.rows if part is not None)

    def decoded(self) -> Array:
        codes = self.plain_codes()
        numbers = codes.astype(np.float32) - self.form.zero
        if self.form.table is not None:
            numbers = self.form.table[codes]
        numbers = numbers * self._factors(self.scale, self.fine_scale)
        if self.least is not None:
            numbers = numbers - self._factors(self.least, self.fine_least)
        return numbers.reshape(self.shape)

    def _factors(self, scale: torch.Tensor, fine: torch.Tensor | None) -> Array:
        depth = self.shape[-1]
        if self.one_scale:
            return to_host(scale).astype(np.float32)
        whole = np.repeat(self.plain(scale).astype(np.float32), self.form.super, axis=1)[:, :depth]
        if fine is None:
            return whole
        return whole * np.repeat(self.plain(fine).astype(np.float32), self.form.group, axis=1)[:, :depth]

    def plain_codes(self) -> Array:
        """A row's beside each other."""
        bits, (rows, depth), matrices = self.form.bits, self.shape[-2:], self._matrices(self.codes)
        return np.concatenate([plain_codes(one, bits, rows, depth, self.together) for one in matrices])

    def plain(self, factors: torch.Tensor) -> Array:
        """A row's beside each other."""
        matrices = self._matrices(factors)
        return np.concatenate([untiled(one, self.shape[-2]) if self.together else one for one in matrices])

    def _matrices(self, parts: torch.Tensor) -> Array:
        """Of each matrix its rows or tiles."""
        array = to_host(parts)
        return array.reshape(prod(self.shape[:-2]), -1, array.shape[1])


def joinable(weights: Sequence[Dense | Coded]) -> bool:
    """Whether matrices [N, K] may be parts of one: decoded alike, by kernels that take codes as they are."""
    first, *others = weights
    if any(isinstance(one, Coded) and one.together and one.shape[0] % TILE for one in weights[:-1]):
        return False
    if isinstance(first, Dense):
        return all(isinstance(one, Dense) and one.array.dtype == first.array.dtype for one in others)
    plain = not first.one_scale and not first.multiplies_fp8
    return plain and all(
        isinstance(one, Coded) and one.form is first.form and _types(one) == _types(first) for one in others
    )


def _types(weight: Coded) -> list[torch.dtype | None]:
    return [None if part is None else part.dtype for part in weight.rows]


def joined(weights: Sequence[Dense | Coded]) -> Dense | Coded:
    """One matrix of several that are ``joinable``, whose memory they are parts of from then on."""
    if all(isinstance(one, Dense) for one in weights):
        return Dense(_beside([one.array for one in weights if isinstance(one, Dense)]))
    coded = [one for one in weights if isinstance(one, Coded)]
    rows = [None if column[0] is None else _beside(column) for column in zip(*(one.rows for one in coded), strict=True)]
    codes, scale, fine_scale, least, fine_least = rows
    assert codes is not None and scale is not None
    shape = (sum(one.shape[0] for one in coded), coded[0].shape[1])
    return replace(
        coded[0], shape=shape, codes=codes, scale=scale, fine_scale=fine_scale, least=least, fine_least=fine_least
    )


def _beside(given: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Rows [N, ...] of all: where they already lie, or in new memory, in which each part lies from then on."""
    parts = [part for part in given if part is not None]
    first, rows = parts[0], sum(map(len, parts))
    places = [part.data_ptr() - first.data_ptr() for part in parts]
    if places == [0, *accumulate(part.nbytes for part in parts[:-1])] and _in_one(parts):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    whole, start = torch.cat(parts), 0
    for part in parts:
        part.data = whole[start : start + len(part)]
        start += len(part)
    return whole


def _in_one(parts: Sequence[torch.Tensor]) -> bool:
    return len({part.untyped_storage().data_ptr() for part in parts}) == 1


def pack(ref: WeightRef, progress: Callable[[int], None], device: torch.device, together: int) -> Packed:
    """A weight as codes where its format can be written so, else dense. ``together``: how codes are to lie."""
    weight = _coded(ref, progress, device, together) if ref.format in REPACKED else _dense(ref, progress, device)
    return Packed(weight, weight.nbytes, weight.decoded)


def packed_bytes(ref: WeightRef, together: int) -> int:
    """At most so many bytes does ``pack`` make of a weight; factors that turn out to be alike take less."""
    if ref.format not in REPACKED:
        return prod(ref.shape) * np.dtype(STORED.get(ref.format, np.float32)).itemsize
    form, (*matrices, rows, depth) = REPACKED[ref.format], ref.shape
    together = together if form.few else 0
    if (ref.format, depth, together) not in _first_bytes:
        arrays = _arrays(form.split(np.ascontiguousarray(ref.rows(0, 1))), form, together)
        _first_bytes[ref.format, depth, together] = sum(array.nbytes for array in arrays if array is not None)
    return prod(matrices) * -(-rows // (TILE if together else 1)) * _first_bytes[ref.format, depth, together]


_first_bytes: dict[tuple[str, int, int], int] = {}
"""Of a row of so many columns in a format, or of a tile of rows, as codes and factors."""


def _dense(ref: WeightRef, progress: Callable[[int], None], device: torch.device) -> Dense:
    raw = ref.rows()
    if ref.format in STORED:
        array = np.ascontiguousarray(raw).view(STORED[ref.format]).reshape(ref.shape)
    else:
        array = ref.dense()
    progress(raw.nbytes)
    return Dense(from_host(array, device))


def _coded(ref: WeightRef, progress: Callable[[int], None], device: torch.device, together: int) -> Coded:
    form, (*matrices, rows, depth) = REPACKED[ref.format], ref.shape
    together = together if form.few else 0
    step = -(-max(1, CHUNK // depth) // TILE) * TILE
    chunks = []
    for begin in range(0, prod(matrices) * rows, rows):
        for first in range(begin, begin + rows, step):
            raw = np.ascontiguousarray(ref.rows(first, min(first + step, begin + rows)))
            arrays = _arrays(form.split(raw), form, together)
            chunks.append(tuple(None if array is None else from_host(array, device) for array in arrays))
            progress(raw.nbytes)
    codes, scale, fine_scale, least, fine_least = (_joined(column) for column in zip(*chunks, strict=True))
    assert codes is not None and scale is not None
    table = None if form.table is None else from_host(form.table, device)
    weight = Coded(form, ref.shape, codes, scale, fine_scale, least, fine_least, table, together)
    if form.zero == 128 and _same(scale, TILE if together else 1):
        natural = from_host(weight.plain_codes(), device)
        form = replace(form, group=WHOLE_ROW, super=WHOLE_ROW, zero=0)
        scale = from_host(np.ascontiguousarray(weight.plain(scale)[:, :1]), device)
        return Coded(form, ref.shape, (natural ^ 128).view(torch.int8), scale, None, None, None, table)
    if form.e4m3 and multiplies_fp8():
        form, scale = _with_few_scales(form, scale)
        return replace(weight, form=form, scale=scale)
    return weight


def _same(scale: torch.Tensor, each: int) -> bool:
    """Whether all that a row has are, of rows or tiles with ``each`` rows."""
    groups = scale.view(len(scale), -1, each)
    return bool((groups == groups[:, :1]).all())


def _with_few_scales(form: Form, scale: torch.Tensor) -> tuple[Form, torch.Tensor]:
    """A scale a row, or for 128 columns, where those of 32 are the same."""
    if bool((scale == scale[:, :1]).all()):
        return replace(form, group=WHOLE_ROW, super=WHOLE_ROW), scale[:, :1].contiguous()
    if scale.shape[1] % 4 == 0:
        fours = scale.view(len(scale), -1, 4)
        if bool((fours == fours[:, :, :1]).all()):
            return replace(form, group=FP8_GROUP, super=FP8_GROUP), fours[:, :, 0].contiguous()
    return form, scale


def _arrays(parts: Parts, form: Form, together: int) -> tuple[Array | None, ...]:
    factors: tuple[Array | None, ...] = (parts.scale, parts.fine_scale, parts.least, parts.fine_least)
    if together:
        factors = tuple(None if one is None else tiled(one) for one in factors)
    return packed_codes(parts.codes, form.bits, together), *factors


def _joined(chunks: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    there = [chunk for chunk in chunks if chunk is not None]
    return None if not there else there[0] if len(there) == 1 else torch.cat(there)
