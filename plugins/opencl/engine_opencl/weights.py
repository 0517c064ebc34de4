"""Packing: vectors as f32; matrices into panels of 16 columns, a range of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl

from engine.backend.v1 import Array, Packed, WeightRef

from .device import OpenCLDevice
from .formats import FORMATS

PANEL = 16
RANGE = 4096
"""Rows read at a time, whole panels."""
_DENSE = {"F16": ("half", "<u2"), "BF16": ("ushort", "<u2"), "F32": ("float", "<f4")}


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
        return {"BITS": 8 * np.dtype(dtype).itemsize, "CODE": type_}
    one = FORMATS[format_]
    codes = {"BITS": one.bits, "CODE": "ushort" if one.bits == 4 else "char", "GROUP": one.group}
    return {**codes, "OFFSET": one.offset, "MINIMUM": int(one.minimum), "SCALE": one.scale}


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
    stored = [
        scale.astype(np.float16 if about.scale == "half" else np.float32) for scale in scales if scale is not None
    ]
    return [part.reshape(last - first, -1) for part in (codes, *stored)]


def _unpack(device: OpenCLDevice, matrix: Matrix) -> Array:
    """The dense matrix: every row looked up, as an embedding."""
    ids, out = device.copy_in(np.arange(matrix.n, dtype=np.int32)), device.alloc((matrix.n, matrix.k), "f32")
    sizes = np.int32(matrix.n), np.int32(matrix.k), np.float32(1)
    kernel = cl.Kernel(matrix.program(device), "embed")
    kernel(device.queue, (matrix.k, matrix.n), None, matrix.buffer, ids.buffer, out.buffer, *sizes)
    return device.copy_out(out)
