"""Free extents of a cache group: runs of consecutive blocks that nobody holds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Set

from .block_pool import check_size


class ExtentPool:
    """Blocks 1 to ``num_blocks - 1`` (0 is the null block), taken and given back in runs.

    A pinned block that is given back is free only once it is unpinned: a step being built copies from it.
    """

    def __init__(self, num_blocks: int) -> None:
        check_size(num_blocks)
        self.num_blocks = num_blocks
        self.free = num_blocks - 1
        self._starts = [1]  # both lists are in the order of the blocks
        self._lengths = [num_blocks - 1]
        self._pins: Counter[int] = Counter()
        self._late: set[int] = set()

    @property
    def largest(self) -> int:
        """Blocks of the longest free extent."""
        return max(self._lengths, default=0)

    def take(self, needed: int, wanted: int) -> tuple[int, int] | None:
        """Best fit: the first block and the length of a new extent, of ``wanted`` blocks out of the shortest free extent
        that has as many, else of all of the longest, if that has ``needed``."""
        fitting = [n for n, length in enumerate(self._lengths) if length >= wanted]
        if fitting:
            n, length = min(fitting, key=self._lengths.__getitem__), wanted
        elif self._lengths and self.largest >= needed:
            n = self._lengths.index(self.largest)
            length = self._lengths[n]
        else:
            return None
        start = self._starts[n]
        self._cut(n, length)
        return start, length

    def take_at(self, start: int, length: int) -> bool:
        """A new extent at ``start``, if so many blocks are free there."""
        n = bisect_right(self._starts, start) - 1
        if n < 0 or self._starts[n] + self._lengths[n] < start + length:
            return False
        before, after = start - self._starts[n], self._starts[n] + self._lengths[n] - start - length
        self._cut(n, self._lengths[n])
        self._insert(start - before, before)
        self._insert(start + length, after)
        return True

    def room_for(self, length: int) -> int:
        """How many extents of ``length`` could be taken one after the other."""
        return sum(free // length for free in self._lengths)

    def grow(self, end: int, needed: int, wanted: int) -> int:
        """As many of ``wanted`` blocks from ``end`` on as are free, if there are ``needed``; else none."""
        n = bisect_left(self._starts, end)
        if n == len(self._starts) or self._starts[n] != end or self._lengths[n] < needed:
            return 0
        length = min(wanted, self._lengths[n])
        self._cut(n, length)
        return length

    def room_after(self, end: int) -> int:
        """Free blocks from ``end`` on."""
        n = bisect_left(self._starts, end)
        return self._lengths[n] if n < len(self._starts) and self._starts[n] == end else 0

    def give(self, start: int, length: int) -> None:
        """Blocks ``start`` to ``start + length - 1`` are no longer held."""
        first = start
        for block in sorted(block for block in self._pins if start <= block < start + length):
            self._late.add(block)
            self._insert(first, block - first)
            first = block + 1
        self._insert(first, start + length - first)

    @property
    def pinned(self) -> Set[int]:
        return self._pins.keys()

    def pin(self, block: int) -> None:
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        self._pins[block] -= 1
        if self._pins[block] == 0:
            del self._pins[block]
            if block in self._late:
                self._late.remove(block)
                self._insert(block, 1)

    def _cut(self, n: int, length: int) -> None:
        self.free -= length
        if length == self._lengths[n]:
            del self._starts[n], self._lengths[n]
        else:
            self._starts[n] += length
            self._lengths[n] -= length

    def _insert(self, start: int, length: int) -> None:
        if length == 0:
            return
        self.free += length
        n = bisect_left(self._starts, start)
        if n < len(self._starts) and start + length == self._starts[n]:
            length += self._lengths[n]
            del self._starts[n], self._lengths[n]
        if n and self._starts[n - 1] + self._lengths[n - 1] == start:
            self._lengths[n - 1] += length
        else:
            self._starts.insert(n, start)
            self._lengths.insert(n, length)

    def check(self, held: list[int]) -> None:
        """Raises AssertionError unless each block is held once, free once, or pinned and to be free (tests)."""
        listed = [b for s, n in zip(self._starts, self._lengths, strict=True) for b in range(s, s + n)]
        assert len(listed) == self.free, "the number of free blocks is wrong"
        assert sorted([*held, *listed, *self._late]) == list(range(1, self.num_blocks)), "a block is lost or held twice"
        ends = [start + length for start, length in zip(self._starts, self._lengths, strict=True)]
        assert not set(ends) & set(self._starts), "two free extents are one"
        assert min(self._pins.values(), default=1) > 0 and self._late <= set(self._pins)
