"""What a call of attention says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend.v1 import Call


@dataclass(frozen=True)
class Shape:
    """Its attributes. ``value_dim``: the width of a latent cache's values, else 0."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    window: int
    softcap: float
    value_dim: int
    causal: bool

    @property
    def out_dim(self) -> int:
        return self.value_dim or self.head_dim

    @staticmethod
    def of(call: Call) -> Shape:
        names = ("heads", "kv_heads", "head_dim", "scale", "block_size", "window", "softcap", "v_head_dim", "causal")
        return Shape(*(call.attr(name) for name in names))
