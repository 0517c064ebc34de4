"""The contiguous allocator: a sequence's blocks in a group are consecutive, so its cache is one array.

Best fit over free extents. An extent is taken at the predicted length of the sequence, and grows in place; where its
neighbour is in the way, the sequence moves to another extent, by block copies, and where there is none, others are
preempted. Room that is only predicted is taken back from everybody before that.

What it gives up: nothing is shared. There is no prefix cache, a fork copies all blocks of its parent, and blocks behind a
window are kept (a model's layers with and without a window are one group).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import KVCacheError
from .allocator import BlockCopy, BlockTable, PrefixHit
from .block_pool import PoolStats
from .cache_group import CacheGroup, check_pools
from .extents import ExtentPool
from .length_predictor import LengthHistogram, LengthPredictor


@dataclass(eq=False)
class Allocation:
    """What one sequence holds: in each group an extent [start, length]. ``length``: tokens allocated; ``most``: the most it
    ever had."""

    limit: int
    prompt: int
    extents: list[tuple[int, int]]
    length: int = 0
    most: int = 0
    snapshot: tuple[BlockTable, ...] | None = None


@dataclass
class Extents:
    """A cache group, its free extents, and the copies of the step being built, destination -> source (pinned). Extents are
    counted in ``page`` blocks."""

    spec: CacheGroup
    pool: ExtentPool
    page: int = 1
    copies: dict[int, int] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Blocks that sequences may hold."""
        return self.pool.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks of these that nobody holds."""
        return self.pool.free

    def length(self, tokens: int) -> int:
        """That of an extent for so many tokens."""
        return -(-self.spec.blocks(tokens) // self.page)

    def blocks(self, start: int, tokens: int) -> range:
        """Those that hold the tokens of a sequence whose extent begins at ``start``."""
        return range(start * self.page, start * self.page + self.spec.blocks(tokens))

    def take(self, needed: int, wanted: int) -> tuple[int, int] | None:
        return self.pool.take(needed, wanted)

    def copy(self, source: int, destination: int, tokens: int) -> None:
        for block, copy in zip(self.blocks(source, tokens), self.blocks(destination, tokens), strict=True):
            # What is itself about to be copied comes from where that comes from.
            first = self.copies.get(block, block)
            self.copies[copy] = first
            self.pool.pin(first // self.page)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies = tuple((source, copy) for copy, source in self.copies.items())
        for source, _ in copies:
            self.pool.unpin(source // self.page)
        self.copies.clear()
        return copies

    def release(self, start: int, length: int) -> None:
        """Gives an extent back; copies into it are not needed any more."""
        first, end = start * self.page, (start + length) * self.page
        for block in [block for block in self.copies if first <= block < end]:
            self.pool.unpin(self.copies.pop(block) // self.page)
        if length:
            self.pool.give(start, length)


class ContiguousAllocator:
    """Consecutive blocks, a pool a group. ``num_blocks`` counts each group's blocks, the null block included."""

    _groups: Sequence[Extents]

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_blocks: tuple[int, ...],
        predictor: LengthPredictor | None = None,
    ) -> None:
        check_pools(groups, num_blocks)
        for group in groups:
            if group.kind not in ("full", "latent"):
                raise KVCacheError(
                    f"cache group {group.name!r} is of kind {group.kind!r}; this allocator takes full and latent groups"
                )
        self.groups = groups
        self._groups = [Extents(g, ExtentPool(n)) for g, n in zip(groups, num_blocks, strict=True)]
        self._predictor: LengthPredictor = LengthHistogram() if predictor is None else predictor
        self._sequences: dict[int, Allocation] = {}

    def open(self, seq_id: int, limit: int, salt: bytes = b"", prompt: int = 0) -> None:
        if seq_id in self._sequences:
            raise KVCacheError(f"sequence {seq_id} is open already; sequence ids are unique while in use")
        for group in self._groups:
            group.spec.check_room(limit, group.length(limit) * group.page, group.usable)
        self._sequences[seq_id] = Allocation(limit, prompt, [(0, 0)] * len(self._groups))

    def match(self, seq_id: int, token_ids: list[int], limit: int) -> PrefixHit:
        return PrefixHit(0, ((),) * len(self._groups))

    def can_fit(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        sequence = self._sequences[seq_id]
        end = sequence.length + count + (hit.num_tokens if hit else 0)
        for group, (start, length) in zip(self._groups, sequence.extents, strict=True):
            needed = group.length(end)
            if needed > length + group.pool.room_after(start + length) and needed > group.pool.largest:
                return False
        return True

    def allocate(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        sequence = self._sequences[seq_id]
        if not self.can_fit(seq_id, count, hit):
            if not sequence.length:
                return False  # others keep what is reserved for them until one of them needs it
            self._trim()
            if not self.can_fit(seq_id, count, hit):
                return False
        if hit and hit.num_tokens and sequence.length:
            raise KVCacheError("a prefix hit is attached to a sequence that holds tokens; attach it to an empty one")
        end = sequence.length + count + (hit.num_tokens if hit else 0)
        self._reach(sequence, end, self._predicted(sequence, end), moving=sequence.extents[0][1] > 0)
        return True

    def _reach(self, sequence: Allocation, end: int, predicted: int, moving: bool) -> None:
        """Extents for ``end`` tokens, which are known to fit, and for those ``predicted`` where there is room."""
        for i, group in enumerate(self._groups):
            start, length = sequence.extents[i]
            needed, wanted = group.length(end), group.length(predicted)
            if needed <= length:
                continue
            if more := group.pool.grow(start + length, needed - length, wanted - length) if length else 0:
                sequence.extents[i] = start, length + more
                continue
            taken = group.take(needed, wanted)
            if taken is None:
                raise KVCacheError(f"there is no extent of {needed} blocks; ask `can_fit` first")
            sequence.extents[i] = taken
            if moving:
                group.copy(start, taken[0], sequence.length)
            group.release(start, length)
        self._set_length(sequence, end)
        sequence.most = max(sequence.most, end)

    def _set_length(self, sequence: Allocation, tokens: int) -> None:
        sequence.length, sequence.snapshot = tokens, None

    def _predicted(self, sequence: Allocation, end: int) -> int:
        output = max(0, max(end, sequence.most) - sequence.prompt)
        return max(end, min(sequence.limit, sequence.prompt + self._predictor.predict(sequence.prompt, output)))

    def _trim(self) -> None:
        """Takes back what is reserved and not needed yet."""
        for sequence in self._sequences.values():
            for i, group in enumerate(self._groups):
                start, length = sequence.extents[i]
                held = group.length(sequence.length)
                if held < length:
                    group.release(start + held, length - held)
                    sequence.extents[i] = start, held

    def tables(self, seq_id: int) -> tuple[BlockTable, ...]:
        sequence = self._sequences[seq_id]
        if sequence.snapshot is None:
            held = zip(self._groups, sequence.extents, strict=True)
            sequence.snapshot = tuple(tuple(group.blocks(start, sequence.length)) for group, (start, _) in held)
        return sequence.snapshot

    def can_fork(self, parent: int, children: int) -> bool:
        source = self._sequences[parent]
        for group in self._groups:
            needed = group.length(source.length + 1)
            if children + 1 > group.pool.largest // needed:
                return False
        return True

    def fork(self, parent: int, child: int) -> None:
        """The child gets an extent of its own, and copies of the parent's blocks."""
        source, sequence = self._sequences[parent], self._sequences[child]
        if sequence.length:
            raise KVCacheError(f"sequence {child} holds {sequence.length} tokens; only an empty one can become a fork")
        if source.length == 0:
            return
        end = source.length + 1  # room for the first token of its own, and no more: its siblings need theirs
        self._reach(sequence, end, end, moving=False)
        self._set_length(sequence, source.length)
        for group, (start, _), (own, _) in zip(self._groups, source.extents, sequence.extents, strict=True):
            group.copy(start, own, source.length)

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], ...]:
        return tuple(group.take_copies() for group in self._groups)

    def commit(self, seq_id: int, token_ids: list[int], num_computed: int) -> None:
        """Nothing is shared, so nothing is registered."""

    def rewind(self, seq_id: int, num_tokens: int) -> None:
        """The room stays reserved."""
        self._set_length(self._sequences[seq_id], num_tokens)

    def free(self, seq_id: int) -> None:
        sequence = self._sequences[seq_id]
        self._set_length(sequence, 0)
        for group, (start, length) in zip(self._groups, sequence.extents, strict=True):
            group.release(start, length)
        sequence.extents = [(0, 0)] * len(self._groups)

    def close(self, seq_id: int) -> None:
        sequence = self._sequences[seq_id]
        self.free(seq_id)
        del self._sequences[seq_id]
        if sequence.most > sequence.prompt:
            self._predictor.observe(sequence.prompt, sequence.most - sequence.prompt)

    def forget(self) -> None:
        """No prefix is ever hit."""

    def stats(self) -> tuple[PoolStats, ...]:
        return tuple(PoolStats(group.usable, group.free, group.usable - group.free, 0) for group in self._groups)

    def check(self) -> None:
        for i, group in enumerate(self._groups):
            held: list[int] = []
            for sequence in self._sequences.values():
                start, length = sequence.extents[i]
                assert group.length(sequence.length) <= length, "a sequence has tokens beyond its extent"
                assert sequence.length or not length, "an empty sequence holds blocks"
                held += range(start, start + length)
            group.pool.check(held)
            assert not set(group.copies) & set(group.copies.values()), "a copy's destination is copied from"
            assert {block // group.page for block in group.copies} <= set(held), (
                "a copy goes to a block that nobody holds"
            )
