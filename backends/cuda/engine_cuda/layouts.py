"""The KV layout: blocks of tokens with their heads, as the references have it."""

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


PAGES = KVLayout("cuda.pages", ("f32", "f16", "bf16", "int8"), _shapes)
"""k and v [blocks, block_size, kv_heads, head_dim]; of int8 f32 scales [blocks, block_size, kv_heads] beside them."""
