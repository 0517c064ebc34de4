"""Cache groups: the layers of a model that share one shape of page table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import AdmissionError, KVCacheError

GroupKind = Literal["full", "window", "latent", "recurrent"]
RECURRENT_WINDOW = 2
"""Of a block, a recurrent layer reads what is remembered after its last token: the next token sees that of the one before."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose cache grows alike, so that one page table a sequence serves them all.

    ``block_size`` is in tokens. ``window`` is the number of last positions that a layer reads, for the kinds "window" and
    "recurrent" only. ``layers`` are indices into the model.
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
        if (self.kind in ("window", "recurrent")) != (self.window is not None and self.window >= 1):
            raise KVCacheError(
                f"cache group {self.name!r} of kind {self.kind!r} has window {self.window}; "
                "a window of at least 1 goes with the kinds 'window' and 'recurrent' and with no other"
            )

    def blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens lie in."""
        return -(-tokens // self.block_size)

    def behind(self, computed: int) -> int:
        """How many of a sequence's first blocks no query sees any more once ``computed`` tokens are computed: the next
        query, at position ``computed``, sees the last ``window`` positions up to its own."""
        return 0 if self.window is None else max(0, computed + 1 - self.window) // self.block_size

    def steady(self, blocks: int, freed: int) -> int:
        """Up to how many tokens so many blocks suffice, while no more than the first ``freed`` of them are behind."""
        whole = blocks * self.block_size
        return whole if self.window is None else min(whole, (freed + 1) * self.block_size + self.window - 1)

    def most_blocks(self, tokens: int, chunk: int | None = None) -> int:
        """The most blocks that a sequence of ``tokens`` tokens holds at a time, when a step computes at most ``chunk`` of
        them: behind a window blocks are given back, so what counts is the window and the chunk, wherever they begin in
        a block."""
        whole = self.blocks(tokens)
        if self.window is None or chunk is None:
            return whole
        return min(whole, self.blocks(self.window + chunk - 2) + 1)

    def check_room(self, tokens: int, needed: int, usable: int) -> None:
        """AdmissionError where a sequence of so many tokens needs more blocks than a pool has besides the null block."""
        if needed > usable:
            raise AdmissionError(
                f"Prompt and max_tokens make {tokens} tokens, which need {needed} blocks of {self.block_size} in cache group"
                f" {self.name!r}; its pool has {usable} ({usable * self.block_size} tokens) and the null block."
            )


def check_pools(groups: Sequence[CacheGroup], num_blocks: Sequence[int]) -> None:
    """KVCacheError unless there are groups, and a number of blocks for each."""
    if not groups or len(groups) != len(num_blocks):
        raise KVCacheError(f"{len(groups)} cache groups came with {len(num_blocks)} block counts; give one for each")
