"""Packing: vectors as f32, matrices into panels of 16 columns, with the codes and scales of their blocks as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl

from engine.backend.v1 import Array, Packed, WeightRef

from .device import OpenCLDevice

PANEL = 16
RANGE = 4096  # rows read at a time, whole panels
_DENSE = {"F16": ("half", "<u2"), "BF16": ("ushort", "<u2"), "F32": ("float", "<f4")}
Parts = tuple[Array, Array, Array | None]
"""Of blocks: codes [n, block], f32 scales [n, block / group], f32 minimums of that shape or None."""


class Format(NamedTuple):
    """``size``: bytes of a block; ``bits`` of a code: 4, unsigned, or 8, signed; ``group`` weights have a ``scale``, which is
    kept as half where that holds it, else as float."""

    size: int
    bits: int
    group: int
    scale: str
    decode: Callable[[Array], Parts]
    offset: int = 0
    minimum: bool = False


def _cut(blocks: Array, *widths: int) -> list[Array]:
    """Parts of blocks by their widths; the last takes what is left."""
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(widths), axis=1)]


def _f16(part: Array) -> Array:
    return part.view("<f2").astype(np.float32)


def _bits(part: Array, width: int, run: int) -> Array:
    """Fields of ``width`` bits of bytes [n, m]: of each ``run`` bytes first the lowest of all, then the next ones."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (part.reshape(len(part), -1, 1, run) >> shifts & np.uint8(2**width - 1)).reshape(len(part), -1)


def _fours(blocks: Array, minimum: bool = False, zero: bool = False) -> Parts:
    scale, least, codes = _cut(blocks, 2, 2 * minimum + zero)
    scale = _f16(scale)
    return _bits(codes, 4, 16), scale, _f16(least) if minimum else -scale * least if zero else None


def _fives(blocks: Array, minimum: bool) -> Parts:
    scale, least, high, low = _cut(blocks, 2, 2 * minimum, 4)
    codes = (_bits(low, 4, 16) | np.unpackbits(high, axis=1, bitorder="little") << 4).view(np.int8)
    return codes - np.int8(0 if minimum else 16), _f16(scale), _f16(least) if minimum else None


def _eights(blocks: Array, dtype: str) -> Parts:
    scale, codes = _cut(blocks, np.dtype(dtype).itemsize)
    return codes.view(np.int8), scale.view(dtype).astype(np.float32), None


def _q4_k(blocks: Array, fifth: bool = False) -> Parts:
    """Q4_K, or Q5_K with a fifth bit. Eight scales and minimums of six bits each lie in twelve bytes."""
    d, least, first, second, rest, high, low = _cut(blocks, 2, 2, 4, 4, 4, 32 * fifth)
    factor = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minimum = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    codes = (_bits(low, 4, 32) | _bits(high, 1, 32) << 4).view(np.int8) if fifth else _bits(low, 4, 32)
    return codes, _f16(d) * factor, -_f16(least) * minimum


def _q6_k(blocks: Array) -> Parts:
    low, high, scales, d = _cut(blocks, 128, 64, 16)
    codes = (_bits(low, 4, 64) | _bits(high, 2, 32) << 4).view(np.int8) - np.int8(32)
    return codes, _f16(d) * scales.view(np.int8), None


FORMATS = {  # whose products take 8-bit activations
    "Q4_0": Format(18, 4, 32, "half", _fours, offset=8),
    "Q4_1": Format(20, 4, 32, "half", partial(_fours, minimum=True), minimum=True),
    "W4Z": Format(19, 4, 32, "float", partial(_fours, zero=True), minimum=True),
    "Q5_0": Format(22, 8, 32, "half", partial(_fives, minimum=False)),
    "Q5_1": Format(24, 8, 32, "half", partial(_fives, minimum=True), minimum=True),
    "Q8_0": Format(34, 8, 32, "half", partial(_eights, dtype="<f2")),
    "W8S": Format(36, 8, 32, "float", partial(_eights, dtype="<f4")),
    "Q4_K": Format(144, 4, 32, "float", _q4_k, minimum=True),
    "Q5_K": Format(176, 8, 32, "float", partial(_q4_k, fifth=True), minimum=True),
    "Q6_K": Format(210, 8, 16, "float", _q6_k),
}


class Matrix(NamedTuple):
    """A matrix [n, k] on the device, and the macros that its kernels are built with."""

    buffer: cl.Buffer
    n: int
    k: int
    macros: Mapping[str, int | str]

    def program(self, device: OpenCLDevice) -> Any:
        return device.program("linear", "product:1", "product:4", **self.macros)


def pack(device: OpenCLDevice, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
    """What a linear or an embedding reads as a ``Matrix``, everything else as a buffer of floats."""
    if len(ref.shape) == 2 and {"linear", "linear_group", "embed"} & set(uses):
        return _pack_matrix(device, ref, progress)
    tensor = device.copy_in(np.asarray(ref.dense(), np.float32))
    progress(ref.rows().nbytes)
    return Packed(tensor.buffer, tensor.nbytes, lambda: device.copy_out(tensor))


def _pack_matrix(device: OpenCLDevice, ref: WeightRef, progress: Callable[[int], None]) -> Packed:
    n, k = ref.shape
    panels = -(-n // PANEL)
    known = ref.format in FORMATS or ref.format in _DENSE
    whole = None if known else np.asarray(ref.dense(), np.float32)  # kept decoded
    sizes = [panels * PANEL * prod(part.shape[1:]) * part.itemsize for part in _parts(ref, whole, 0, 1)]
    buffer = device.buffer(sum(sizes))
    device.used += sum(sizes)
    for first in range(0, n, RANGE):
        begin = 0
        for part, size in zip(_parts(ref, whole, first, min(first + RANGE, n)), sizes, strict=True):
            padded = np.concatenate([part, np.zeros((-len(part) % PANEL, part.shape[1]), part.dtype)])
            laid = np.ascontiguousarray(padded.reshape(-1, PANEL, part.shape[1]).swapaxes(1, 2))
            cl.enqueue_copy(device.queue, buffer, laid, dst_offset=begin + first // PANEL * (size // panels))
            begin += size
        progress(ref.rows(first, min(first + RANGE, n)).nbytes)
    matrix = Matrix(buffer, n, k, _macros(ref.format))
    return Packed(matrix, sum(sizes), lambda: _unpack(device, matrix))


def _macros(format_: str) -> dict[str, int | str]:
    if format_ not in FORMATS:
        type_, dtype = _DENSE.get(format_, _DENSE["F32"])
        return {"BITS": 8 * np.dtype(dtype).itemsize, "CODE": type_, "X": "float"}
    one, names = FORMATS[format_], ("BITS", "CODE", "X", "DOT", "GROUP", "OFFSET", "MINIMUM", "SCALE")
    types = ("ushort", "short", "int") if one.bits == 4 else ("char", "float", "float")
    return dict(zip(names, (one.bits, *types, one.group, one.offset, int(one.minimum), one.scale), strict=True))


def _parts(ref: WeightRef, whole: Array | None, first: int, last: int) -> list[Array]:
    """Rows as they are stored, [rows, units]: numbers, or codes (four of 4 bits in one), scales and minimums."""
    if whole is not None:
        return [whole[first:last]]
    raw = np.ascontiguousarray(ref.rows(first, last))
    if ref.format in _DENSE:
        return [raw.view(_DENSE[ref.format][1])]
    about = FORMATS[ref.format]
    with np.errstate(all="ignore"):  # scales of damaged blocks are infinite
        codes, *scales = about.decode(raw.reshape(-1, about.size))
    if about.bits == 4:
        fours = codes.reshape(len(codes), -1, 4).astype(np.uint16)
        codes = fours[..., 0] | fours[..., 1] << 4 | fours[..., 2] << 8 | fours[..., 3] << 12
    dtype = np.float16 if about.scale == "half" else np.float32
    stored = [scale.astype(dtype) for scale in scales if scale is not None]
    return [part.reshape(last - first, -1) for part in (codes, *stored)]


def _unpack(device: OpenCLDevice, matrix: Matrix) -> Array:
    """The dense matrix: every row looked up, as an embedding."""
    ids, out = device.copy_in(np.arange(matrix.n, dtype=np.int32)), device.alloc((matrix.n, matrix.k), "f32")
    sizes = np.int32(matrix.n), np.int32(matrix.k), np.float32(1)
    kernel = cl.Kernel(matrix.program(device), "embed")
    kernel(device.queue, (matrix.k, matrix.n), None, matrix.buffer, ids.buffer, out.buffer, *sizes)
    return device.copy_out(out)
