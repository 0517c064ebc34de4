"""Matrices of integers in groups along K, each with a scale and a zero point: weight = scale * (code - zero).

What GPTQ, AWQ and compressed-tensors have in common once their codes are unpacked. The format of the composed weight is
the smallest that holds its values: Q4_0 and Q8_0 where the zero point is the middle and each scale is an f16 number (bf16
scales of usual size are), W4Z for other zero points of four bits, and W8S and W8M with f32 scales otherwise. All are exact
but that f32 scales are rounded to 22 of their 24 significant bits, as the formats ask: a relative error of 2^-23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import FormatError
from engine.formats.checkpoint import ANY_INPUT, ComposedTensor, InputSpec, Tensor
from engine.formats.quantformats import FORMATS, Bytes, Floats
from engine.formats.quantized.blocks import BLOCK, are_halves, by_halves, octets, row
from engine.formats.quantized.stored import Ints

MOST = 2.0**100
"""Larger scales are damage: products in f32 would overflow."""


@dataclass(frozen=True)
class Groups:
    """The parts of a matrix [N, K], read anew each time for the rows start to stop.

    codes: uint8 [n, K]; scales: f32 [n, groups]; zeros: integers [n, groups], or the one of all groups.
    bits: 4 or 8, of a code; size: k a group; order: i32 [K], the group of each k where groups are not runs (act-order).
    """

    name: str
    shape: tuple[int, int]
    bits: int
    size: int
    codes: Callable[[int, int], Bytes]
    scales: Callable[[int, int], Floats]
    zeros: Callable[[int, int], Ints] | int
    order: Ints | None = None

    @property
    def count(self) -> int:
        return -(-self.shape[1] // self.size)


def compose_groups(groups: Groups, parts: tuple[Tensor, ...], spec: InputSpec = ANY_INPUT) -> ComposedTensor:
    """The weight; FormatError where the groups are not whole blocks or a scale is not finite."""
    columns, blocks = _blocks_of(groups)
    form = _format(groups)
    for part in parts:
        part.release()

    def read(start: int, stop: int) -> Bytes:
        codes = groups.codes(start, stop)
        if columns is not None:
            codes = np.take(codes, columns, axis=1)  # ten times as fast as indexing
        scales = groups.scales(start, stop)[:, blocks]
        zeros = groups.zeros if isinstance(groups.zeros, int) else groups.zeros(start, stop)[:, blocks]
        return _ENCODERS[form](codes.reshape(len(codes), -1, BLOCK), scales, zeros)

    if columns is not None:
        spec = InputSpec(columns.astype(np.int32), spec.quantized, spec.scale)
    return ComposedTensor(groups.name, groups.shape, FORMATS[form], input=spec, parts=parts, read=read)


def check_scales(name: str, scales: Floats) -> None:
    """FormatError for a scale that is not finite, or larger than any real one."""
    if not (np.abs(scales) <= MOST).all():  # false for NaN, too
        raise FormatError(f"The scales of {name} are not all finite numbers of at most 2^100; the file is damaged.")


def _blocks_of(groups: Groups) -> tuple[Ints | None, Ints]:
    """The columns that k stands for, where that is another order than the stored one, and the group of each block."""
    depth = groups.shape[1]
    if depth % BLOCK:
        raise FormatError(f"{groups.name} has {depth} inputs; quantized weights have a multiple of {BLOCK}.")
    if groups.order is None:
        if groups.size % BLOCK and groups.count > 1:
            raise FormatError(f"{groups.name} has groups of {groups.size}; supported are multiples of {BLOCK}, and -1.")
        return None, np.arange(0, depth, BLOCK) // groups.size
    columns = np.argsort(groups.order, kind="stable")
    sorted_order = groups.order[columns].reshape(-1, BLOCK)
    if not (sorted_order == sorted_order[:, :1]).all():
        raise FormatError(
            f"g_idx of {groups.name} makes groups that are no multiples of {BLOCK} inputs, as they must be."
        )
    return (None if (np.diff(columns) == 1).all() else columns), sorted_order[:, 0]


def _format(groups: Groups) -> str:
    rows = groups.shape[0]
    scales = groups.scales(0, rows)
    check_scales(groups.name, scales)
    middle = 1 << groups.bits - 1
    centred = bool(np.all((groups.zeros if isinstance(groups.zeros, int) else groups.zeros(0, rows)) == middle))
    halves = are_halves(scales)
    if groups.bits == 4:
        return "W8S" if not halves else "Q4_0" if centred else "W4Z"
    return "W8M" if not centred else "Q8_0" if halves else "W8S"


# -- blocks: codes u8 [n, blocks, 32], scales f32 [n, blocks], zeros [n, blocks] or one -> u8 [n, row bytes] -------------


def _rounded(scales: Floats) -> Floats:
    """To 22 significant bits, ties to even."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    return (bits + 1 + (bits >> 2 & 1) & ~np.uint32(3)).view(np.float32)


def _q4_0(codes: Bytes, scales: Floats, zeros: Ints | int) -> Bytes:
    return row(octets(scales, "<f2"), by_halves(codes))


def _w4z(codes: Bytes, scales: Floats, zeros: Ints | int) -> Bytes:
    return row(octets(scales, "<f2"), octets(np.broadcast_to(zeros, scales.shape), "u1"), by_halves(codes))


def _signed(codes: Bytes, zeros: Ints | int) -> Bytes:
    """code - zero as the bits of i8."""
    signed: npt.NDArray[Any] = codes - np.asarray(zeros, np.uint8)[..., None]
    return signed.astype(np.uint8, copy=False)


def _q8_0(codes: Bytes, scales: Floats, zeros: Ints | int) -> Bytes:
    return row(octets(scales, "<f2"), _signed(codes, zeros))


def _w8s(codes: Bytes, scales: Floats, zeros: Ints | int) -> Bytes:
    return row(octets(_rounded(scales), "<f4"), _signed(codes, zeros))


def _w8m(codes: Bytes, scales: Floats, zeros: Ints | int) -> Bytes:
    scales = _rounded(scales)
    return row(octets(scales, "<f4"), octets(scales * np.asarray(zeros, np.float32), "<f4"), codes)


_ENCODERS: dict[str, Callable[[Bytes, Floats, Ints | int], Bytes]] = {
    "Q4_0": _q4_0,
    "W4Z": _w4z,
    "Q8_0": _q8_0,
    "W8S": _w8s,
    "W8M": _w8m,
}
