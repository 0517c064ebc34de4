"""Cache groups: the layers of a model that share one shape of page table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import KVCacheError

GroupKind = Literal["full", "window", "latent", "recurrent", "cross"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose cache grows alike, so that one page table a sequence serves them all.

    ``block_size`` is in tokens. ``window`` is the number of last positions that attention reads, for kind "window"
    only; blocks behind it are kept for now. ``layers`` are indices into the model.
    """

    name: str
    kind: GroupKind
    block_size: int
    window: int | None = None
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise KVCacheError(
                f"cache group {self.name!r} has a block size of {self.block_size}; it must be at least 1"
            )
        if (self.kind == "window") != (self.window is not None and self.window >= 1):
            raise KVCacheError(
                f"cache group {self.name!r} of kind {self.kind!r} has window {self.window}; "
                "a window of at least 1 goes with kind 'window' and with no other"
            )
