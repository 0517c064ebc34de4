"""Packing: vectors as f32; matrices into panels of 16 columns, a range of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyopencl as cl

from engine.backend.v1 import Array, Packed, WeightRef

from .formats import FORMATS, codes_of

if TYPE_CHECKING:
    from .device import OpenCLDevice

PANEL = 16
RANGE = 4096
"""Rows read at a time, whole panels."""
_DENSE = {"F32": (32, "<f4"), "F16": (16, "<u2"), "BF16": (16, "<u2")}


@dataclass(frozen=True)
class Matrix:
    """A matrix [n, k] on the device, and the macros that its kernels are built with."""

    buffer: cl.Buffer
    n: int
    k: int
    macros: Mapping[str, int]


def macros_of(format_: str) -> dict[str, int]:
    """What kernels have to know of a format. One that is not known is kept decoded, as floats."""
    if format_ in FORMATS:
        about = FORMATS[format_]
        numbers = {"BITS": about.bits, "GROUP": about.group, "OFFSET": about.offset}
        return numbers | {"MINIMUM": about.minimum, "HALF_SCALE": about.half}
    return {"BITS": _DENSE.get(format_, (32, ""))[0], "BF16": format_ == "BF16"}


def pack_vector(device: OpenCLDevice, ref: WeightRef, progress: Callable[[int], None]) -> Packed:
    dense = np.ascontiguousarray(ref.dense(), np.float32)
    tensor = device.copy_in(dense)
    progress(ref.rows().nbytes)
    return Packed(tensor.buffer, dense.nbytes, lambda: device.copy_out(tensor))


def pack_matrix(device: OpenCLDevice, ref: WeightRef, progress: Callable[[int], None]) -> Packed:
    n, k = ref.shape
    macros = macros_of(ref.format)
    sections = _sections(ref.format, n, k)
    buffer = device.buffer(sum(sections))
    known = ref.format in FORMATS or ref.format in _DENSE
    whole = None if known else ref.dense().astype(np.float32)
    for first in range(0, n, RANGE):
        raw = ref.rows(first, min(first + RANGE, n))
        parts = _parts(ref.format, raw) if whole is None else [whole[first : first + RANGE, :, None]]
        offset = 0
        for part, size in zip(parts, sections, strict=True):
            panels = _panels(part)
            at = offset + first // PANEL * (size // -(-n // PANEL))
            cl.enqueue_copy(device.queue, buffer, panels, dst_offset=at)
            offset += size
        progress(raw.nbytes)
    matrix = Matrix(buffer, n, k, macros)
    return Packed(matrix, sum(sections), lambda: _unpack(device, matrix))


def _sections(format_: str, n: int, k: int) -> list[int]:
    """Bytes of the codes, and of scales and minimums."""
    columns = -(-n // PANEL) * PANEL
    if format_ not in FORMATS:
        return [columns * k * macros_of(format_)["BITS"] // 8]
    about = FORMATS[format_]
    scales = columns * k // about.group * (2 if about.half else 4)
    return [columns * k * about.bits // 8, *[scales] * (1 + about.minimum)]


def _parts(format_: str, raw: Array) -> list[Array]:
    """Rows as codes, scales and minimums, [rows, units, bytes of one as an array of its own]."""
    if format_ in _DENSE:
        return [np.ascontiguousarray(raw).view(_DENSE[format_][1])[..., None]]
    about = FORMATS[format_]
    codes, *scales = codes_of(format_, np.ascontiguousarray(raw))
    if about.bits == 4:
        fours = codes.reshape(len(codes), -1, 4).astype(np.uint16)
        codes = fours[..., 0] | fours[..., 1] << 4 | fours[..., 2] << 8 | fours[..., 3] << 12
    stored = [scale.astype(np.float16 if about.half else np.float32) for scale in scales if scale is not None]
    return [part[..., None] for part in (codes, *stored)]


def _panels(part: Array) -> Array:
    """[rows, units, 1] as [panels, units, 16], zeros behind the last row."""
    rows, units = part.shape[:2]
    padded = part[..., 0]
    if rows % PANEL:
        padded = np.concatenate([padded, np.zeros((-rows % PANEL, units), part.dtype)])
    return np.ascontiguousarray(padded.reshape(-1, PANEL, units).swapaxes(1, 2))


def _unpack(device: OpenCLDevice, matrix: Matrix) -> Array:
    """The dense matrix: every row looked up, as an embedding."""
    ids = device.copy_in(np.arange(matrix.n, dtype=np.int32))
    out = device.alloc((matrix.n, matrix.k), "f32")
    kernel = cl.Kernel(linear_program(device, matrix.macros), "embed")
    sizes = (np.int32(matrix.n), np.int32(matrix.k), np.float32(1))
    kernel(device.queue, (matrix.k, matrix.n), None, matrix.buffer, ids.buffer, out.buffer, *sizes)
    dense = device.copy_out(out)
    for tensor in (ids, out):
        device.free(tensor)
    return dense


def linear_program(device: OpenCLDevice, macros: Mapping[str, int]) -> cl.Program:
    return device.program(("linear", "product:1", "product:4"), **macros)


def is_matrix(ref: WeightRef, uses: Sequence[str]) -> bool:
    return len(ref.shape) == 2 and bool({"linear", "linear_group", "embed"} & set(uses))
