"""The block pool: which blocks of a cache group are in use, free, or free with a prefix worth keeping."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import KVCacheError
from .prefix_index import PrefixIndex

NULL_BLOCK = 0


@dataclass(frozen=True)
class PoolStats:
    """Blocks of a pool without the null block: ``free`` + ``used`` + ``cached`` = ``total``."""

    total: int
    free: int
    used: int
    cached: int


def check_size(num_blocks: int) -> None:
    """KVCacheError where a pool would have no block beside the null block."""
    if num_blocks < 2:
        raise KVCacheError(
            f"a pool of {num_blocks} blocks holds nothing: it needs the null block and at least one more"
        )


class BlockPool:
    """A fixed number of blocks with reference counts.

    Block 0 is the null block, which padding points at: it is never allocated, freed or counted. Blocks that nobody
    refers to are in the free list, least recently used first; those among them that the prefix index still knows are
    *cached*, and are evicted when they are handed out. Blocks with nothing to keep go to the head, so that they are
    handed out before.
    """

    def __init__(self, num_blocks: int) -> None:
        check_size(num_blocks)
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self.refs = [0] * num_blocks
        # The free list is threaded through two arrays; the null block is its sentinel.
        self._next: list[int] = [*range(1, num_blocks), NULL_BLOCK]
        self._prev: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self._available = num_blocks - 1
        self._cached = 0

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        return self._available

    def stats(self) -> PoolStats:
        total = self.num_blocks - 1
        return PoolStats(total, self._available - self._cached, total - self._available, self._cached)

    def allocate(self) -> int:
        """The least recently used free block, with one reference; what it cached is forgotten."""
        block = self._next[NULL_BLOCK]
        if block == NULL_BLOCK:
            raise KVCacheError(f"all {self.num_blocks - 1} blocks of the pool are in use; ask for `available` first")
        self._unlink(block)
        if block in self.index:
            self.index.remove(block)
            self._cached -= 1
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is in use or cached."""
        if self.refs[block] == 0:
            if block not in self.index:
                raise KVCacheError(f"block {block} is free and holds nothing; only used or cached blocks can be shared")
            self._unlink(block)
            self._cached -= 1
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one puts the block into the free list."""
        if self.refs[block] == 0:
            raise KVCacheError(f"block {block} is released more often than it was allocated and shared")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if block in self.index:
                self._link(block, after=self._prev[NULL_BLOCK])
                self._cached += 1
            else:
                self._link(block, after=NULL_BLOCK)

    def forget(self) -> None:
        """Empties the prefix index: what the blocks held is lost."""
        self.index.clear()
        self._cached = 0

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._available -= 1

    def _link(self, block: int, after: int) -> None:
        following = self._next[after]
        self._prev[block], self._next[block] = after, following
        self._next[after] = self._prev[following] = block
        self._available += 1

    def check(self) -> None:
        """Raises AssertionError where the pool contradicts itself (tests; walks the whole pool)."""
        listed: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            assert self._prev[self._next[block]] == block and len(listed) < self.num_blocks, "free list is broken"
            listed.append(block)
            block = self._next[block]
        assert self.refs[NULL_BLOCK] == 0 and NULL_BLOCK not in self.index, "the null block was touched"
        assert min(self.refs) >= 0, "a reference count is negative"
        assert sorted(listed) == [b for b in range(1, self.num_blocks) if self.refs[b] == 0], (
            "free list and counts differ"
        )
        assert self._available == len(listed), "the number of available blocks is wrong"
        assert self._cached == sum(b in self.index for b in listed), "the number of cached blocks is wrong"
        stats = self.stats()
        assert min(stats.free, stats.used, stats.cached) >= 0
        assert stats.free + stats.used + stats.cached == stats.total == self.num_blocks - 1
        self.index.check()
