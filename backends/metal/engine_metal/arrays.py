"""Storage tags and MLX arrays. bf16 has a type of its own here, and lies in uint16 on the host."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from engine.backend.v1 import Array

DTYPES: Mapping[str, mx.Dtype] = {
    "f32": mx.float32,
    "f16": mx.float16,
    "bf16": mx.bfloat16,
    "int8": mx.int8,
    "i32": mx.int32,
    "u32": mx.uint32,
    "u8": mx.uint8,
}


def from_host(array: Array) -> mx.array:
    """A copy of a host array, contiguous. uint16 is bf16."""
    value = mx.array(np.ascontiguousarray(array).reshape(array.shape))
    return value.view(mx.bfloat16) if array.dtype == np.uint16 else value


def to_host(value: mx.array) -> Array:
    """A copy on the host, once it is computed."""
    if value.dtype == mx.bfloat16:
        value = value.view(mx.uint16)
    return np.array(value)
