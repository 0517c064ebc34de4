"""Random weights in the formats that the native linear packs, and what they mean."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from one_kernel import native

from engine.formats import FORMATS as ENGINE_FORMATS
from engine.formats.codebooks import codebook
from engine.ops.dense import SPANS, dequantize_q8, quantize_q8
from engine.ops.dtypes import from_f32, to_f32

DENSE = ("F32", "F16", "BF16")
CODEBOOKS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
K_BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0", *CODEBOOKS)
GGUF_QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", *K_BLOCKS)
QUANTIZED = (*GGUF_QUANTIZED, "NVFP4S", "W4Z", "W8S", "W8M")  # whose kernels read activations of 8 bits
TABLES = ("NF4", "FP4")
LARGE_BLOCKS = (*K_BLOCKS, *TABLES, "NVFP4S")  # of more than 32
FORMATS = (*DENSE, "FP8", *TABLES, *QUANTIZED)
# f32 numbers at the beginning of a block
FLOAT_SCALES = {"NVFP4S": 1, "W8S": 1, "W8M": 2, "FP8": 1, "NF4": 1, "FP4": 1}
HALVES = {  # byte offsets of a block's f16 scales
    "Q4_0": (0,),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q5_K": (0, 2),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "W4Z": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys((name for name in CODEBOOKS if name != "IQ1_M"), (0,)),
}


@dataclass(frozen=True)
class Weight:
    """raw u8 [N, row bytes], its f32 values [N, K] by the gguf package or the format's decoder, and the packed form."""

    name: str
    raw: np.ndarray
    values: np.ndarray
    packed: Any


def random_rows(
    rng: np.random.Generator, name: str, columns: int, depth: int, halves: np.ndarray | None = None
) -> np.ndarray:
    """Every byte random, except scales: normal, or drawn from the f16 array ``halves``. MXFP4's are powers of two near one,
    or with ``halves`` any that keep the weights finite."""
    if name in DENSE:
        values = rng.standard_normal((columns, depth), np.float32)
        if name == "F32":
            return values.view(np.uint8)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = ENGINE_FORMATS[name].block, ENGINE_FORMATS[name].block_bytes
    raw = rng.integers(0, 256, (columns, depth // block, size), np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(120, 131, raw.shape[:2]) if halves is None else rng.integers(0, 251, raw.shape[:2])
    for offset in HALVES.get(name, ()):
        shape = raw.shape[:2]
        scales = rng.standard_normal(shape) if halves is None else rng.choice(halves, shape)
        raw[..., offset : offset + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if name == "IQ1_M":  # an f16 in the highest four bits of four numbers
        scales = rng.standard_normal(raw.shape[:2]) if halves is None else rng.choice(halves, raw.shape[:2])
        parts = scales.astype(np.float16).view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16) & 15
        rest = np.ascontiguousarray(raw[..., 48:]).view(np.uint16) & 0xFFF
        raw[..., 48:] = (rest | parts << 12).astype(np.uint16).view(np.uint8)
    if name in FLOAT_SCALES:
        shape = (*raw.shape[:2], FLOAT_SCALES[name])
        scales = rng.standard_normal(shape) if halves is None else rng.choice(halves, shape)
        bits = scales.astype(np.float32).view(np.uint32)
        raw[..., : 4 * shape[2]] = (bits & ~np.uint32(3) if name in QUANTIZED else bits).view(np.uint8)
    if name == "FP8":
        raw[..., 4:][raw[..., 4:] & 127 == 127] = 0  # NaN, which loading refuses
    return raw.reshape(columns, -1)


def dequantized(name: str, raw: np.ndarray) -> np.ndarray:
    if name in ENGINE_FORMATS and ENGINE_FORMATS[name].ggml_type is None:
        return ENGINE_FORMATS[name].decode(raw)
    return np.asarray(quants.dequantize(raw, GGMLQuantizationType[name]), np.float32)


def alloc(name: str, columns: int, depth: int, count: int = 1) -> Any:
    return native.alloc(name, columns, depth, count, codebook(name).tolist())


def random_weight(rng: np.random.Generator, name: str, columns: int, depth: int) -> Weight:
    raw = random_rows(rng, name, columns, depth)
    packed = alloc(name, columns, depth)
    native.pack_into(packed, raw)
    return Weight(name, raw, dequantized(name, raw), packed)


def layout_of(*names: str) -> str:
    """The packed activation that the kernels of formats read, any of which is quantized."""
    return "q8g128" if set(names) & set(K_BLOCKS) else "q8g32"


def span_of(name: str) -> int:
    return SPANS[layout_of(name)]


def read_by(name: str, x: np.ndarray, layout: str = "") -> list[np.ndarray | None]:
    """x f32 as the kernels of a format read it, in the places of linear's first two inputs."""
    if name in QUANTIZED:
        return [quantize_q8(x, layout or layout_of(name)), None]
    return [None, from_f32(x, "bf16") if name == "BF16" else x]


def multiplied(name: str, x: np.ndarray, layout: str = "") -> np.ndarray:
    """The values that such kernels multiply, f32."""
    packed, plain = read_by(name, x, layout)
    if packed is not None:
        return dequantize_q8(packed)
    return to_f32(plain, "bf16") if name == "BF16" else x
