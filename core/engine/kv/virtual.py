"""The virtual allocator: a sequence's blocks are consecutive addresses, taken for its limit when it begins, and memory is mapped
to them page by page as it grows (vAttention; Prabhu et al. 2024, arXiv 2405.04437).

So a sequence never moves, and what it may still need costs nothing. There are far more addresses than memory: block ids count
addresses, and the budget counts pages, which are the blocks that a device can map at a time. The pages of a sequence that has
ended stay mapped; who begins next takes their addresses, and they lose their memory only when a page elsewhere needs it.

Nothing is shared, as with the contiguous allocator: a fork copies, and what is behind a window is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import KVCacheError
from .allocator import PrefixHit, Remap, Runs
from .cache_group import CacheGroup
from .contiguous import Allocation, ContiguousAllocator, Extents
from .extents import ExtentPool


@dataclass
class MappedExtents(Extents):
    """Extents of pages, of which at most ``budget`` are mapped at a time: ``held`` by sequences, or ``idle``, those least lately
    used first. ``begun``: where extents began that have been given back, the last one last. ``mapping`` and ``unmapping``: what
    is to be done before the step being built; dictionaries are sets in order."""

    budget: int = 0
    held: int = 0
    idle: dict[int, None] = field(default_factory=dict)
    begun: dict[int, None] = field(default_factory=dict)
    mapping: dict[int, None] = field(default_factory=dict)
    unmapping: dict[int, None] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        return self.budget * self.page

    @property
    def free(self) -> int:
        return self.room * self.page

    @property
    def room(self) -> int:
        """Pages that sequences could get; what is copied from yet keeps its memory."""
        pinned = tuple(self.pool.pinned)  # other threads look while the loop's pins
        return self.budget - self.held - sum(page in self.idle for page in pinned)

    def take(self, needed: int, wanted: int) -> tuple[int, int] | None:
        """Where memory is mapped already, if that is anywhere."""
        for start in reversed(tuple(self.begun)):
            if start not in self.idle:
                del self.begun[start]
            elif self.pool.take_at(start, wanted):
                return start, wanted
        return super().take(wanted, wanted)

    def release(self, start: int, length: int) -> None:
        super().release(start, length)
        if length:
            self.begun.pop(start, None)
            self.begun[start] = None

    def resize(self, start: int, before: int, after: int) -> None:
        """The extent at ``start`` holds ``after`` pages in place of ``before``."""
        for page in range(start + before, start + after):
            self._hold(page)
        for page in reversed(range(start + after, start + before)):  # its end is given to others first
            self.held -= 1
            self.idle[page] = None

    def _hold(self, page: int) -> None:
        if page in self.idle:
            del self.idle[page]
        else:
            if self.held + len(self.idle) == self.budget:
                self._unmap(next(page for page in self.idle if page not in self.pool.pinned))
            _change(page, self.mapping, self.unmapping)
        self.held += 1

    def _unmap(self, page: int) -> None:
        del self.idle[page]
        _change(page, self.unmapping, self.mapping)

    def take_remap(self) -> Remap:
        remap = Remap(self._runs(self.unmapping), self._runs(self.mapping))
        self.unmapping.clear()
        self.mapping.clear()
        return remap

    def _runs(self, pages: Iterable[int]) -> Runs:
        """Blocks of pages, as few runs as there are."""
        runs: list[tuple[int, int]] = []
        for page in sorted(pages):
            if runs and sum(runs[-1]) == page:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((page, 1))
        return tuple((first * self.page, count * self.page) for first, count in runs)


def _change(page: int, done: dict[int, None], undone: dict[int, None]) -> None:
    """What is undone again in the same step is not done at all."""
    if page in undone:
        del undone[page]
    else:
        done[page] = None


class VirtualAllocator(ContiguousAllocator):
    """``num_blocks`` counts the blocks of each group that there is memory for, and ``spaces`` those that there are addresses for,
    both in whole ``pages`` of so many blocks; the first page is the null block's, and always mapped."""

    _groups: Sequence[MappedExtents]

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: tuple[int, ...],
        pages: tuple[int, ...],
        spaces: tuple[int, ...],
    ) -> None:
        super().__init__(groups, num_blocks)
        if len(pages) != len(groups) or len(spaces) != len(groups):
            raise KVCacheError("a virtual allocator needs a page size and a number of addresses for each cache group")
        sizes = list(zip(groups, num_blocks, pages, spaces, strict=True))
        if any(
            blocks % page or space % page or space < blocks or blocks < 2 * page for _, blocks, page, space in sizes
        ):
            raise KVCacheError(
                f"pools of {num_blocks} blocks with addresses for {spaces} are not whole pages of {pages} blocks, or hold"
                " nothing beside the null block's page"
            )
        self._groups = [
            MappedExtents(group, ExtentPool(space // page), page, budget=blocks // page - 1)
            for group, blocks, page, space in sizes
        ]

    def can_fit(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        sequence = self._sequences[seq_id]
        end = sequence.length + count + (hit.num_tokens if hit else 0)
        for group, (_, length) in zip(self._groups, sequence.extents, strict=True):
            reserved = length or group.length(sequence.limit)
            if group.length(end) > reserved or (not length and group.pool.largest < reserved):
                return False
            if group.length(end) - group.length(sequence.length) > group.room:
                return False
        return True

    def can_fork(self, parent: int, children: int) -> bool:
        """A fork has its parent's limit."""
        source = self._sequences[parent]
        for group in self._groups:
            held, needed = group.length(source.length), group.length(source.length + 1)
            if needed * (children + 1) - held > group.room:
                return False
            if group.pool.room_for(group.length(source.limit)) < children:
                return False
        return True

    def take_remaps(self) -> tuple[Remap, ...]:
        remaps = tuple(group.take_remap() for group in self._groups)
        return remaps if any(remap.unmapped or remap.mapped for remap in remaps) else ()

    def forget(self) -> None:
        """No page is mapped any more."""
        for i, group in enumerate(self._groups):
            group.idle.clear()
            group.begun.clear()
            group.unmapping.clear()
            group.mapping = dict.fromkeys(page for page in self._held(i))

    def check(self) -> None:
        super().check()
        for i, group in enumerate(self._groups):
            held = self._held(i)
            mapped = {*held, *group.idle}
            assert len(held) == group.held and len(mapped) == group.held + len(group.idle), "a page is held twice"
            assert len(mapped) <= group.budget and group.room >= 0, "more pages are mapped than there is memory for"
            assert group.mapping.keys() <= mapped and not group.unmapping.keys() & mapped

    def _held(self, i: int) -> list[int]:
        group = self._groups[i]
        extents = ((s.extents[i][0], group.length(s.length)) for s in self._sequences.values())
        return [page for start, length in extents for page in range(start, start + length)]

    def _reach(self, sequence: Allocation, end: int, predicted: int, moving: bool) -> None:
        """The first time addresses up to its limit are taken, so that nothing more is to be predicted."""
        super()._reach(sequence, end, sequence.limit, moving=False)

    def _set_length(self, sequence: Allocation, tokens: int) -> None:
        for group, (start, _) in zip(self._groups, sequence.extents, strict=True):
            group.resize(start, group.length(sequence.length), group.length(tokens))
        super()._set_length(sequence, tokens)

    def _trim(self) -> None:
        """What is reserved is in nobody's way."""
