"""NF4 as bitsandbytes stores it: 16 quantiles of a normal distribution, scaled by the largest weight of each 64 (QLoRA, Dettmers
et al. 2023, arXiv 2305.14314), which double quantization keeps in 8 bits."""

from __future__ import annotations

import json

import numpy as np

from engine.backend.v1 import Array
from engine.formats.hfblocks import NF4_TABLE
from engine.formats.quantformats import Floats
from engine.formats.safetensors_writer import StoredTensor
from engine.quantize.search import quotients

BLOCK = 64
NESTED_BLOCK = 256
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stored(name: str, shape: tuple[int, ...], nested: bool) -> tuple[StoredTensor, ...]:
    """What ``name`` (...weight) [N, K] becomes, but for its quant_state, whose size depends on its text."""
    count = int(np.prod(shape))
    blocks = -(-count // BLOCK)
    found = [
        StoredTensor(name, "U8", (-(-count // 2), 1)),
        StoredTensor(f"{name}.absmax", "U8" if nested else "F32", (blocks,)),
        StoredTensor(f"{name}.quant_map", "F32", (16,)),
    ]
    if nested:
        found += [
            StoredTensor(f"{name}.nested_absmax", "F32", (-(-blocks // NESTED_BLOCK),)),
            StoredTensor(f"{name}.nested_quant_map", "F32", (256,)),
        ]
    return tuple(found)


def encode(values: Floats) -> tuple[Array, Floats]:
    """Whole blocks of weights, f32 [n * 64] (or a last, shorter one): bytes uint8 [ceil(n * 64 / 2)], the earlier weight high,
    and the largest of each block, f32 [n]."""
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK, np.float32)
    padded[: values.size] = values
    blocks = padded.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    shares = quotients(blocks, largest[:, None])
    index = np.searchsorted((NF4_TABLE[1:] + NF4_TABLE[:-1]) / 2, shares).astype(np.uint8).reshape(-1)
    packed: Array = index[0::2] << 4 | index[1::2]
    return packed[: -(-values.size // 2)], largest


def encode_scales(largest: Floats) -> tuple[Array, Floats, float]:
    """Double quantization of the scales f32 [blocks]: indices of ``dynamic_map`` uint8 [blocks], the largest of each 256 f32, and
    the mean, which was taken off."""
    offset = float(largest.mean())
    padded = np.zeros(-(-largest.size // NESTED_BLOCK) * NESTED_BLOCK, np.float32)
    padded[: largest.size] = largest - np.float32(offset)
    blocks = padded.reshape(-1, NESTED_BLOCK)
    top = np.abs(blocks).max(axis=1)
    numbers = dynamic_map()
    index = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, quotients(blocks, top[:, None])).astype(np.uint8)
    return index.reshape(-1)[: largest.size], top, offset


def dynamic_map() -> Floats:
    """The 256 numbers of dynamic tree quantization (Dettmers et al. 2021, arXiv 2110.02861): in each decade from 1e-7 on twice
    as many as in the one before, evenly spaced, of both signs; 0; and 1."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        borders = np.linspace(0.1, 1, 2**decade + 1)
        middles = (borders[1:] + borders[:-1]) / 2 * 10.0 ** (decade - 6)
        numbers += [*middles, *-middles]
    return np.sort(np.array(numbers, np.float32))


def quant_state(name: str, form: str, shape: tuple[int, ...], offset: float | None) -> tuple[StoredTensor, bytes]:
    """The JSON text that bitsandbytes keeps as a tensor beside the weight. ``form``: the format of the weight before."""
    state: dict[str, object] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": _DTYPES[form], "shape": list(shape)}
    if offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state).encode()
    return StoredTensor(f"{name}.quant_state.bitsandbytes__nf4", "U8", (len(text),)), text


def config(skipped: list[str], form: str, nested: bool) -> dict[str, object]:
    """quantization_config of config.json."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": _DTYPES[form],
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": skipped,
    }
