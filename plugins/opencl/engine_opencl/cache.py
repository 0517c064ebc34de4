"""How the KV cache lies: rows of heads in the order of the tokens, scales beside them."""

from __future__ import annotations

from collections.abc import Mapping

from engine.backend.v1 import KVLayout, KVSpec


def _shapes(spec: KVSpec) -> Mapping[str, tuple[tuple[int, ...], str]]:
    tokens = (spec.blocks, spec.block_size, spec.kv_heads)
    kinds = ("k",) if spec.latent else ("k", "v")
    shapes: dict[str, tuple[tuple[int, ...], str]] = {kind: ((*tokens, spec.head_dim), spec.dtype) for kind in kinds}
    if spec.dtype == "int8":
        shapes |= {f"{kind}_scale": (tokens, "f32") for kind in kinds}
    return shapes


ROWS = KVLayout("opencl.rows", ("f32", "f16", "bf16", "int8"), _shapes)
KV_MACROS = {"f32": {}, "f16": {"KV_F16": 1}, "bf16": {"KV_BF16": 1}, "int8": {"KV_INT8": 1}}
