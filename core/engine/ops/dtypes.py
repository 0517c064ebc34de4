"""Storage tags and f32: f32, f16, bf16 (held as uint16), int8, int16, and fp8 for the E4M3 numbers of a cache, which lie in the
tag u8. Narrowing rounds to nearest, ties to even."""

from __future__ import annotations

import numpy as np

from ..backend.v1 import HOST_DTYPES, Array
from ..errors import OpError
from ..fp8 import E4M3_TABLE, to_e4m3

_FLOAT_TAGS = {tag: HOST_DTYPES[tag] for tag in ("f32", "f16", "bf16", "int8", "int16")} | {"fp8": HOST_DTYPES["u8"]}


def storage_tag(array: Array) -> str:
    """The tag of a stored float array, by its NumPy dtype (uint16 is bf16, uint8 fp8). OpError for another dtype."""
    for tag, dtype in _FLOAT_TAGS.items():
        if array.dtype == dtype:
            return tag
    raise OpError(
        f"The dtype {array.dtype} has no storage tag; it must be float32, float16, uint16, int8, int16 or uint8."
    )


def to_f32(array: Array, tag: str) -> Array:
    """Stored values as f32, same shape; int8 and int16 give their integers."""
    if tag == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if tag == "fp8":
        return E4M3_TABLE[array]
    return array.astype(np.float32)


def from_f32(array: Array, tag: str) -> Array:
    """f32 values in a storage tag, same shape. f16 overflows to infinity, int8 saturates at 127 and int16 at 32767 (NaN gives 0),
    fp8 at 448 (NaN and infinities give NaN)."""
    values = np.ascontiguousarray(array, np.float32)
    if tag == "bf16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
        quiet = (bits >> 16) | np.uint32(0x40)
        return np.where(np.isnan(values), quiet, rounded).astype(np.uint16).reshape(array.shape)
    if tag in ("int8", "int16"):
        most = np.iinfo(HOST_DTYPES[tag]).max
        saturated = np.clip(np.rint(np.nan_to_num(values, posinf=most, neginf=-most)), -most, most)
        return saturated.astype(HOST_DTYPES[tag]).reshape(array.shape)
    if tag == "fp8":
        return to_e4m3(values).reshape(array.shape)
    with np.errstate(over="ignore"):
        return values.astype(HOST_DTYPES[tag]).reshape(array.shape)
