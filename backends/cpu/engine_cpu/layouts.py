"""How the KV cache lies in memory for the native kernels: lanes of up to 16 tokens for K, rows of head_dim for V. A latent
cache has rows alone, since its values are parts of its keys."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.backend.v1 import Array, KVLayout, KVSpec

LANES = 16


def _shapes(spec: KVSpec) -> Mapping[str, tuple[tuple[int, ...], str]]:
    lanes = 1 if spec.latent else min(LANES, spec.block_size)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "k": ((spec.blocks, spec.kv_heads, spec.block_size // lanes, spec.head_dim, lanes), spec.dtype),
    }
    if not spec.latent:
        shapes["v"] = ((spec.blocks, spec.kv_heads, spec.block_size, spec.head_dim), spec.dtype)
    if spec.dtype == "int8":
        scales = (spec.blocks, spec.kv_heads, spec.block_size)
        shapes |= {f"{kind}_scale": (scales, "f32") for kind in tuple(shapes)}
    return shapes


def _from_plain(spec: KVSpec, kind: str, plain: Array) -> Array:
    """[blocks, block_size, kv_heads(, head_dim)] as this layout has it."""
    if kind != "k":
        return np.ascontiguousarray(np.moveaxis(plain, 2, 1))
    lanes = 1 if spec.latent else min(LANES, spec.block_size)
    tiles = plain.reshape(spec.blocks, spec.block_size // lanes, lanes, spec.kv_heads, spec.head_dim)
    return np.ascontiguousarray(tiles.transpose(0, 3, 1, 4, 2))


def _to_plain(spec: KVSpec, kind: str, array: Array) -> Array:
    if kind != "k":
        return np.ascontiguousarray(np.moveaxis(array, 1, 2))
    tokens = array.transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(tokens).reshape(spec.blocks, spec.block_size, spec.kv_heads, spec.head_dim)


CPU_LANES = KVLayout("cpu.lanes", ("f32", "f16", "bf16", "int8"), _shapes, _from_plain, _to_plain)
KV_DTYPE_NUMBERS = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3}
