"""The KV layout: blocks of tokens with their heads, as the references have it."""

from __future__ import annotations

from collections.abc import Mapping

from engine.backend.v1 import KVLayout, KVSpec


def _shapes(spec: KVSpec) -> Mapping[str, tuple[tuple[int, ...], str]]:
    tokens = (spec.blocks, spec.block_size, spec.kv_heads)
    kinds = ("k",) if spec.latent else ("k", "v")
    tag = "u8" if spec.dtype == "fp8" else spec.dtype
    shapes: dict[str, tuple[tuple[int, ...], str]] = {kind: ((*tokens, spec.head_dim), tag) for kind in kinds}
    if spec.dtype == "int8":
        shapes |= {f"{kind}_scale": (tokens, "f32") for kind in kinds}
    return shapes


PAGES = KVLayout("cuda.pages", ("f32", "f16", "bf16", "int8", "fp8"), _shapes)
"""k and v [blocks, block_size, kv_heads, head_dim]; of int8 f32 scales [blocks, block_size, kv_heads] beside them, of fp8
(E4M3 in bytes) none."""
