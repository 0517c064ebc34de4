"""The host tier: how much host memory the blocks of swapped sequences take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import KVCacheError


@dataclass(frozen=True)
class HostStats:
    """Bytes of the host tier, and how many sequences lie in it."""

    total: int
    used: int
    sequences: int


class HostPool:
    """``capacity`` bytes for blocks of swapped sequences; ``block_bytes`` is what a block of each cache group takes."""

    def __init__(self, capacity: int, block_bytes: tuple[int, ...]) -> None:
        if capacity < 0 or min(block_bytes, default=0) < 1:
            raise KVCacheError(
                f"a host pool of {capacity} bytes for blocks of {block_bytes} bytes is impossible; both are positive"
            )
        self.capacity = capacity
        self.used = 0
        self.block_bytes = block_bytes
        self._held: dict[int, int] = {}

    def take(self, seq_id: int, blocks: Sequence[int]) -> bool:
        """Room for so many blocks of each group, or False."""
        if seq_id in self._held:
            raise KVCacheError(f"sequence {seq_id} is swapped out already")
        needed = sum(count * size for count, size in zip(blocks, self.block_bytes, strict=True))
        if needed > self.capacity - self.used:
            return False
        self._held[seq_id] = needed
        self.used += needed
        return True

    def give(self, seq_id: int) -> None:
        """Gives back what a sequence has, if anything."""
        self.used -= self._held.pop(seq_id, 0)

    def stats(self) -> HostStats:
        return HostStats(self.capacity, self.used, len(self._held))

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken (tests)."""
        assert 0 <= self.used == sum(self._held.values()) <= self.capacity, "host memory is lost or overdrawn"
