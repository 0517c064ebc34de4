"""What layers remember of the tokens before: a KV cache, or a memory that does not grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ops.kv import WHOLE


@dataclass(frozen=True)
class KVLayer:
    """The cache of one layer: which group's page table it follows and what one token holds. ``latent``: keys alone, of
    which values are a part."""

    layer: int
    group: int
    kv_heads: int
    head_dim: int
    latent: bool = False

    def state(self, kind: str) -> str:
        """The name of its state of a kind."""
        return f"kv.{self.layer}.{kind}"

    def states(self, dtype: str) -> dict[str, str]:
        """Argument -> state name; whole numbers bring scales."""
        kinds = ["k"] if self.latent else ["k", "v"]
        kinds += [f"{kind}_scale" for kind in kinds] if dtype in WHOLE else []
        return {kind: self.state(kind) for kind in kinds}


@dataclass(frozen=True)
class RecurrentLayer:
    """The memory of one layer that does not grow with the tokens: which group's page table it follows, and the shape of each
    kind of state, f32, that a block holds."""

    layer: int
    group: int
    shapes: Mapping[str, tuple[int, ...]]

    def state(self, kind: str) -> str:
        """The name of its state of a kind."""
        return f"recurrent.{self.layer}.{kind}"


def layer_of_state(name: str) -> int:
    """Whose cache or memory a state is."""
    return int(name.split(".")[1])
