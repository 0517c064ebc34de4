"""Storage tags and torch tensors. bf16 has a type of its own here, and lies in uint16 on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from engine.backend.v1 import Array

DTYPES: Mapping[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "i32": torch.int32,
    "u32": torch.uint32,
    "u8": torch.uint8,
}


def from_host(array: Array, device: torch.device) -> torch.Tensor:
    """A copy of a host array, contiguous. uint16 is bf16."""
    host = torch.from_numpy(np.array(array, order="C"))
    value = host.view(torch.bfloat16) if array.dtype == np.uint16 else host
    return value.to(device)


def to_host(value: torch.Tensor) -> Array:
    """A copy on the host, once it is computed."""
    host = value.detach().to("cpu", copy=True)
    array: Array = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()
    return array
