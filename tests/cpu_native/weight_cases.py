"""Random weights in the formats that the native linear packs, and what they mean."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from one_kernel import native

DENSE = ("F32", "F16", "BF16")
QUANTIZED = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
FORMATS = DENSE + QUANTIZED
HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # byte offsets of a block's f16 scales


@dataclass(frozen=True)
class Weight:
    """raw u8 [N, row bytes], its f32 values [N, K] by the gguf package, and the packed form."""

    raw: np.ndarray
    values: np.ndarray
    packed: Any


def random_rows(
    rng: np.random.Generator, name: str, columns: int, depth: int, halves: np.ndarray | None = None
) -> np.ndarray:
    """Every byte random, except scales: normal, or drawn from the f16 array ``halves``."""
    if name in DENSE:
        values = rng.standard_normal((columns, depth), np.float32)
        if name == "F32":
            return values.view(np.uint8)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    raw = rng.integers(0, 256, (columns, depth // block, size), np.uint8)
    for offset in HALVES[name]:
        shape = raw.shape[:2]
        scales = rng.standard_normal(shape) if halves is None else rng.choice(halves, shape)
        raw[..., offset : offset + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(columns, -1)


def dequantized(name: str, raw: np.ndarray) -> np.ndarray:
    return np.asarray(quants.dequantize(raw, GGMLQuantizationType[name]), np.float32)


def random_weight(rng: np.random.Generator, name: str, columns: int, depth: int) -> Weight:
    raw = random_rows(rng, name, columns, depth)
    packed = native.alloc(name, columns, depth)
    native.pack_into(packed, raw)
    return Weight(raw, dequantized(name, raw), packed)
