"""Packed weights: matrices in MLX's affine groups, and dense arrays as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.backend.v1 import Array, Packed, WeightRef

from .arrays import from_host, to_host
from .repack import GROUP, REPACKED, packed_codes

STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
CHUNK = 1 << 22
"""Numbers of a matrix that are repacked at a time."""


@dataclass(frozen=True)
class Affine:
    """A matrix [..., N, K] as codes u32 of ``bits`` each and, for each group of 32 columns, scales and biases, f32 since
    that is what x is in: scale * code + bias. ``spread``: the format's groups are of 16, each of which takes the place of 32
    here; x is spread out likewise, with zeros, so that the other half counts for nothing. ``mode``: affine or MLX's mxfp4."""

    codes: mx.array
    scales: mx.array
    biases: mx.array | None
    bits: int
    spread: bool
    mode: str = "affine"

    def times(self, x: mx.array) -> mx.array:
        """x f32 [..., M, K] times the transposed matrix: f32 [..., M, N]."""
        x = _spread(x) if self.spread else x
        packed = self.codes, self.scales, self.biases
        return mx.quantized_matmul(x, *packed, transpose=True, group_size=GROUP, bits=self.bits, mode=self.mode)

    def of_experts(self, x: mx.array, ids: mx.array, in_order: bool = False) -> mx.array:
        """x f32 [rows, 1, K], each row through the matrix ``ids`` [rows]: f32 [rows, 1, N]. ``in_order``: ids ascend."""
        x = _spread(x) if self.spread else x
        return mx.gather_qmm(
            x,
            self.codes,
            self.scales,
            self.biases,
            rhs_indices=ids,
            transpose=True,
            group_size=GROUP,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=in_order,
        )

    def rows(self, ids: mx.array) -> mx.array:
        """Rows of a matrix [N, K]: f32 [len(ids), K]."""
        return self._decoded(self.codes[ids], self.scales[ids], None if self.biases is None else self.biases[ids])

    def decoded(self) -> Array:
        return to_host(self._decoded(self.codes, self.scales, self.biases))

    def _decoded(self, codes: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
        found = mx.dequantize(codes, scales, biases, group_size=GROUP, bits=self.bits, mode=self.mode, dtype=mx.float32)
        if not self.spread:
            return found
        halves = found.reshape(*found.shape[:-1], -1, GROUP)[..., : GROUP // 2]
        return halves.reshape(*found.shape[:-1], -1)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.biases is None else self.biases.nbytes)


@dataclass(frozen=True)
class Dense:
    """Numbers as they are stored, f32, f16 or bf16; widened to f32 where they are used."""

    array: mx.array

    def times(self, x: mx.array) -> mx.array:
        return x @ self.array.astype(mx.float32).swapaxes(-1, -2)

    def of_experts(self, x: mx.array, ids: mx.array, in_order: bool = False) -> mx.array:
        if ids.size < self.array.shape[0]:  # few: only these are widened
            return x @ self.array[ids].astype(mx.float32).swapaxes(-1, -2)
        return mx.gather_mm(x, self.array.astype(mx.float32).swapaxes(-1, -2), rhs_indices=ids, sorted_indices=in_order)

    def rows(self, ids: mx.array) -> mx.array:
        return self.array[ids].astype(mx.float32)

    def decoded(self) -> Array:
        return to_host(self.array.astype(mx.float32))

    @property
    def nbytes(self) -> int:
        return self.array.nbytes


def pack(ref: WeightRef, progress: Callable[[int], None], check: Callable[[int], None]) -> Packed:
    """A weight in affine groups where its format can be written in them, else dense. ``check`` is asked about its bytes
    before they are taken."""
    weight = _affine(ref, progress, check) if ref.format in REPACKED else _dense(ref, progress, check)
    return Packed(weight, weight.nbytes, weight.decoded)


def _dense(ref: WeightRef, progress: Callable[[int], None], check: Callable[[int], None]) -> Dense:
    raw = ref.rows()
    if ref.format in STORED:
        check(raw.nbytes)
        array = np.ascontiguousarray(raw).view(STORED[ref.format]).reshape(ref.shape)
    else:
        check(4 * int(np.prod(ref.shape)))
        array = ref.dense()
    progress(raw.nbytes)
    stored = from_host(array)
    mx.eval(stored)  # a view as bf16 is a step of MLX's, which no other thread could take
    return Dense(stored)


def _affine(ref: WeightRef, progress: Callable[[int], None], check: Callable[[int], None]) -> Affine:
    form, depth, total = REPACKED[ref.format], ref.shape[-1], int(np.prod(ref.shape[:-1]))
    width = depth * (2 if form.spread else 1)
    affine = form.mode == "affine"
    check(total * (width * form.bits // 8 + (8 if affine else 1) * width // GROUP))
    codes = np.empty((total, width * form.bits // 32), np.uint32)
    scales = np.empty((total, width // GROUP), np.float32 if affine else np.uint8)
    biases = np.empty((total, width // GROUP), np.float32) if affine else None
    step = max(1, CHUNK // depth)
    for first in range(0, total, step):
        raw = np.ascontiguousarray(ref.rows(first, min(first + step, total)))
        part = slice(first, first + len(raw))
        with np.errstate(all="ignore"):  # a damaged block's scales may be infinite, which is their value
            numbers, scales[part], offsets = form.split(raw)
        if biases is not None:
            biases[part] = offsets
        codes[part] = packed_codes(numbers, form)
        progress(raw.nbytes)

    def shaped(part: Array) -> mx.array:
        return from_host(part.reshape(*ref.shape[:-1], part.shape[-1]))

    added = None if biases is None else shaped(biases)
    return Affine(shaped(codes), shaped(scales), added, form.bits, form.spread, form.mode)


def _spread(x: mx.array) -> mx.array:
    """Zeros behind each 16 columns."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP // 2)
    return mx.concatenate([groups, mx.zeros_like(groups)], axis=-1).reshape(*x.shape[:-1], -1)
