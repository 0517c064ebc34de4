"""INT8 as compressed-tensors stores it (format "int-quantized"): weights and activations of 8 bits, a scale for each output
channel, and for activations one for each token, found as they come."""

from __future__ import annotations

import numpy as np

from engine.backend.v1 import Array
from engine.formats.quantformats import Floats
from engine.formats.safetensors_writer import StoredTensor
from engine.quantize.search import quotients

BLOCK = 32
"""Inputs that a layer has a multiple of, for the kernels that compute with it."""


def stored(name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
    """What ``name`` (...weight) [N, K] becomes."""
    return StoredTensor(name, "I8", shape), StoredTensor(f"{name}_scale", "F32", (shape[0], 1))


def encode(values: Floats) -> tuple[Array, Floats]:
    """f32 [rows, K]: int8 [rows, K] and the scales f32 [rows, 1]; the largest weight of a row is 127."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    return np.clip(np.rint(quotients(values, scale)), -127, 127).astype(np.int8), scale


def config(skipped: list[str]) -> dict[str, object]:
    """quantization_config of config.json."""
    shared = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None}
    weights = {**shared, "strategy": "channel", "dynamic": False, "actorder": None, "observer": "minmax"}
    activations = {**shared, "strategy": "token", "dynamic": True, "actorder": None, "observer": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": skipped,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
