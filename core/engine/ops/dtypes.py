"""Storage tags and f32: f32, f16, bf16 (held as uint16) and int8. Narrowing rounds to nearest, ties to even."""

from __future__ import annotations

import numpy as np

from ..backend.v1 import HOST_DTYPES, Array

_FLOAT_TAGS = ("f32", "f16", "bf16", "int8")


def storage_tag(array: Array) -> str:
    """The tag of a stored float array, by its NumPy dtype (uint16 is bf16)."""
    for tag in _FLOAT_TAGS:
        if array.dtype == HOST_DTYPES[tag]:
            return tag
    raise TypeError(f"dtype {array.dtype} has no storage tag; it would have to be float32, float16, uint16 or int8")


def to_f32(array: Array, tag: str) -> Array:
    """Stored values as f32, same shape; int8 gives its integers."""
    if tag == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def from_f32(array: Array, tag: str) -> Array:
    """f32 values in a storage tag, same shape. f16 overflows to infinity, int8 saturates at 127 (NaN gives 0)."""
    values = np.ascontiguousarray(array, np.float32)
    if tag == "bf16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
        quiet = (bits >> 16) | np.uint32(0x40)
        return np.where(np.isnan(values), quiet, rounded).astype(np.uint16).reshape(array.shape)
    if tag == "int8":
        saturated = np.clip(np.rint(np.nan_to_num(values, posinf=127, neginf=-127)), -127, 127)
        return saturated.astype(np.int8).reshape(array.shape)
    with np.errstate(over="ignore"):
        return values.astype(HOST_DTYPES[tag]).reshape(array.shape)
