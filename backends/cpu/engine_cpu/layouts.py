"""How the KV cache lies in memory for the native kernels: lanes of up to 16 tokens for K, rows of head_dim for V. A latent
cache has rows alone, since its values are parts of its keys. In int8 and int16 two dimensions of a key lie together, and the
values of two tokens, for the kernels multiply and add pairs of 16 bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.backend.v1 import Array, KVLayout, KVSpec

LANES = 16


def _lanes(spec: KVSpec) -> tuple[int, int, int]:
    """How many tokens of K lie side by side, in units of how many dimensions, and how many tokens of V do."""
    pair = 2 if spec.dtype in CPU_PAIRS.dtypes else 1
    if spec.latent:
        return 1, pair, 1
    return min(LANES, spec.block_size), pair, min(pair, spec.block_size)


def _shapes(spec: KVSpec) -> Mapping[str, tuple[tuple[int, ...], str]]:
    lanes, unit, beside = _lanes(spec)
    page = (spec.blocks, spec.kv_heads)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "k": ((*page, spec.block_size // lanes, spec.head_dim // unit, lanes, unit), spec.dtype),
    }
    if not spec.latent:
        shapes["v"] = ((*page, spec.block_size // beside, spec.head_dim, beside), spec.dtype)
    if spec.dtype in CPU_PAIRS.dtypes:
        shapes |= {f"{kind}_scale": ((*page, spec.block_size), "f32") for kind in tuple(shapes)}
    return shapes


def _from_plain(spec: KVSpec, kind: str, plain: Array) -> Array:
    """[blocks, block_size, kv_heads(, head_dim)] as this layout has it."""
    lanes, unit, beside = _lanes(spec)
    if kind == "k":
        tiles = plain.reshape(spec.blocks, -1, lanes, spec.kv_heads, spec.head_dim // unit, unit)
        return np.ascontiguousarray(tiles.transpose(0, 3, 1, 4, 2, 5))
    if kind == "v":
        rows = plain.reshape(spec.blocks, -1, beside, spec.kv_heads, spec.head_dim)
        return np.ascontiguousarray(rows.transpose(0, 3, 1, 4, 2))
    return np.ascontiguousarray(np.moveaxis(plain, 2, 1))


def _to_plain(spec: KVSpec, kind: str, array: Array) -> Array:
    if kind not in ("k", "v"):
        return np.ascontiguousarray(np.moveaxis(array, 1, 2))
    tokens = array.transpose((0, 2, 4, 1, 3, 5) if kind == "k" else (0, 2, 4, 1, 3))
    return np.ascontiguousarray(tokens).reshape(spec.blocks, spec.block_size, spec.kv_heads, spec.head_dim)


CPU_LANES = KVLayout("cpu.lanes", ("f32", "f16", "bf16"), _shapes, _from_plain, _to_plain)
CPU_PAIRS = KVLayout("cpu.pairs", ("int16", "int8"), _shapes, _from_plain, _to_plain)
KV_DTYPE_NUMBERS = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3, "int16": 4}
