"""Allocators: how sequences get room in the KV cache.

The scheduler speaks to the ``KVAllocator`` interface only, and an allocator is found by name, so that others
(contiguous ranges, tiers) are additions. ``PagedAllocator`` is paged attention's (Kwon et al. 2023, arXiv
2309.06180): blocks on demand, shared by reference count, copied on the first write to a shared, partially filled
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm
from typing import Protocol

from ..errors import AdmissionError, KVCacheError
from .block_pool import BlockPool, PoolStats
from .cache_group import CacheGroup
from .prefix_index import HashChain

BlockTable = tuple[int, ...]
BlockCopy = tuple[int, int]

ENTRY_POINTS = "engine.kv_allocators"


@dataclass(frozen=True)
class PrefixHit:
    """Cached blocks, a tuple a group, that hold the first ``num_tokens`` tokens of a sequence. Good until the next call
    that changes the allocator."""

    num_tokens: int
    blocks: tuple[BlockTable, ...]


class KVAllocator(Protocol):
    """Room in the KV cache for sequences, by integer ids. ``open`` comes first and ``close`` last.

    A step is built by ``allocate`` for each of its sequences and ended by ``take_copies``. The device applies a
    step's copies before its writes, and steps in order, so blocks freed here may be given out again at once.
    """

    groups: tuple[CacheGroup, ...]

    def open(self, seq_id: int, limit: int, salt: bytes = b"") -> None:
        """A new sequence of at most ``limit`` tokens, holding nothing yet. AdmissionError if it could never fit."""
        ...

    def match(self, seq_id: int, token_ids: list[int], limit: int) -> PrefixHit:
        """The longest cached prefix of ``token_ids[:limit]`` that leaves at least one of them to compute."""
        ...

    def can_fit(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        """Whether ``count`` more tokens find room now, after ``hit`` is attached."""
        ...

    def allocate(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        """Room to write ``count`` more tokens, after attaching ``hit`` to a sequence that holds nothing. All or
        nothing; False where ``can_fit`` is."""
        ...

    def tables(self, seq_id: int) -> tuple[BlockTable, ...]:
        """A block table a group, over all tokens allocated. Immutable, and the same object until it changes."""
        ...

    def can_fork(self, parent: int, children: int) -> bool:
        """Whether the parent and ``children`` forks of it could each write one token more."""
        ...

    def fork(self, parent: int, child: int) -> None:
        """The child, open and holding nothing, shares all that the parent holds."""
        ...

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], ...]:
        """Ends a step: its block copies a group, (source, destination). No destination is a source in the same step."""
        ...

    def commit(self, seq_id: int, token_ids: list[int], num_computed: int) -> None:
        """The first ``num_computed`` tokens are in the cache for sure: prefixes of them may now be hit."""
        ...

    def free(self, seq_id: int) -> None:
        """Gives back all that the sequence holds; it stays open."""
        ...

    def close(self, seq_id: int) -> None:
        """Frees the sequence and forgets it."""
        ...

    def forget(self) -> None:
        """The contents of the cache are lost: no prefix can be hit until it is computed again."""
        ...

    def stats(self) -> tuple[PoolStats, ...]:
        """Block counts a group."""
        ...

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken (tests)."""
        ...


@dataclass(eq=False)
class _Allocation:
    """What one sequence holds. ``length``: tokens allocated, written or about to be."""

    chains: dict[int, HashChain]
    tables: list[list[int]]
    length: int = 0
    committed: int = 0
    snapshot: tuple[BlockTable, ...] | None = None


@dataclass
class _Group:
    """A cache group with its pool and the copies of the step being built. ``pinned``: their sources, which hold one
    reference more, so that no block is written and copied from by the same step's copies."""

    block_size: int
    pool: BlockPool
    copies: list[BlockCopy] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)

    def is_shared(self, block: int) -> bool:
        return self.pool.refs[block] - (block in self.pinned) > 1


class PagedAllocator:
    """Blocks on demand, a pool a group. ``num_blocks`` counts each group's blocks, the null block included."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: tuple[int, ...]) -> None:
        if not groups or len(groups) != len(num_blocks):
            raise KVCacheError(
                f"{len(groups)} cache groups came with {len(num_blocks)} block counts; give one for each"
            )
        for group in groups:
            if group.kind in ("recurrent", "cross"):
                raise KVCacheError(
                    f"cache group {group.name!r} is of kind {group.kind!r}, whose state does not grow with the tokens; "
                    "the paged allocator takes full, window and latent groups"
                )
        self.groups = groups
        self._groups = [_Group(g.block_size, BlockPool(n)) for g, n in zip(groups, num_blocks, strict=True)]
        self._hit_unit = lcm(*(g.block_size for g in groups))
        self._sequences: dict[int, _Allocation] = {}

    def open(self, seq_id: int, limit: int, salt: bytes = b"") -> None:
        if seq_id in self._sequences:
            raise KVCacheError(f"sequence {seq_id} is open already; sequence ids are unique while in use")
        for spec, group in zip(self.groups, self._groups, strict=True):
            needed, usable = -(-limit // group.block_size), group.pool.num_blocks - 1
            if needed > usable:
                raise AdmissionError(
                    f"prompt and max_tokens make {limit} tokens, which need {needed} blocks of {group.block_size} in "
                    f"cache group {spec.name!r}; its pool has {usable} ({usable * group.block_size} tokens) and "
                    "the null block"
                )
        sizes = {group.block_size for group in self._groups}
        self._sequences[seq_id] = _Allocation({s: HashChain(s, salt) for s in sizes}, [[] for _ in self._groups])

    def match(self, seq_id: int, token_ids: list[int], limit: int) -> PrefixHit:
        chains = self._sequences[seq_id].chains
        found: list[list[int]] = []
        length = (limit - 1) // self._hit_unit * self._hit_unit
        for group in self._groups:
            blocks = length // group.block_size
            chain = chains[group.block_size]
            chain.extend(token_ids, blocks)
            found.append(group.pool.index.lookup(chain.keys[:blocks]))
            length = min(length, len(found[-1]) * group.block_size)
        # A hit ends on a block boundary in every group: the last block of a hit is never written to.
        length = length // self._hit_unit * self._hit_unit
        hits = zip(self._groups, found, strict=True)
        return PrefixHit(length, tuple(tuple(blocks[: length // group.block_size]) for group, blocks in hits))

    def can_fit(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        sequence = self._sequences[seq_id]
        end = sequence.length + count + (hit.num_tokens if hit else 0)
        for i, group in enumerate(self._groups):
            table, size, pool = sequence.tables[i], group.block_size, group.pool
            needed = -(-end // size) - len(table) + self._copies_on_write(group, sequence, table)
            if hit:
                # Cached blocks of the hit count too: they leave the free list.
                needed -= sum(pool.refs[block] > 0 for block in hit.blocks[i])
            if needed > pool.available:
                return False
        return True

    def allocate(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        if not self.can_fit(seq_id, count, hit):
            return False
        sequence = self._sequences[seq_id]
        if hit and hit.num_tokens:
            self._attach(sequence, hit)
        end = sequence.length + count
        for group, table in zip(self._groups, sequence.tables, strict=True):
            if self._copies_on_write(group, sequence, table):
                self._copy_last(group, table)
                sequence.snapshot = None
            missing = -(-end // group.block_size) - len(table)
            if missing > 0:
                table.extend(group.pool.allocate() for _ in range(missing))
                sequence.snapshot = None
        sequence.length = end
        return True

    def tables(self, seq_id: int) -> tuple[BlockTable, ...]:
        sequence = self._sequences[seq_id]
        if sequence.snapshot is None:
            sequence.snapshot = tuple(tuple(table) for table in sequence.tables)
        return sequence.snapshot

    def can_fork(self, parent: int, children: int) -> bool:
        return all(group.pool.available > children for group in self._groups)

    def fork(self, parent: int, child: int) -> None:
        source, sequence = self._sequences[parent], self._sequences[child]
        if sequence.length:
            raise KVCacheError(f"sequence {child} holds {sequence.length} tokens; only an empty one can become a fork")
        for group, table in zip(self._groups, source.tables, strict=True):
            for block in table:
                group.pool.share(block)
        sequence.tables = [list(table) for table in source.tables]
        sequence.chains = {size: chain.fork(source.length // size) for size, chain in source.chains.items()}
        sequence.length, sequence.committed, sequence.snapshot = source.length, source.committed, source.snapshot

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], ...]:
        copies = tuple(tuple(group.copies) for group in self._groups)
        for group in self._groups:
            for block in group.pinned:
                group.pool.release(block)
            group.pinned.clear()
            group.copies.clear()
        return copies

    def commit(self, seq_id: int, token_ids: list[int], num_computed: int) -> None:
        sequence = self._sequences[seq_id]
        for group, table in zip(self._groups, sequence.tables, strict=True):
            first, last = sequence.committed // group.block_size, num_computed // group.block_size
            if first < last:
                chain = sequence.chains[group.block_size]
                chain.extend(token_ids, last)
                for i in range(first, last):
                    group.pool.index.insert(chain.keys[i], table[i])
        sequence.committed = num_computed

    def free(self, seq_id: int) -> None:
        sequence = self._sequences[seq_id]
        for group, table in zip(self._groups, sequence.tables, strict=True):
            # Last block first: of a cached prefix the end is evicted before the beginning, which others may share.
            for block in reversed(table):
                group.pool.release(block)
            table.clear()
        sequence.length = sequence.committed = 0
        sequence.snapshot = None

    def close(self, seq_id: int) -> None:
        self.free(seq_id)
        del self._sequences[seq_id]

    def forget(self) -> None:
        for group in self._groups:
            group.pool.forget()

    def stats(self) -> tuple[PoolStats, ...]:
        return tuple(group.pool.stats() for group in self._groups)

    def check(self) -> None:
        for i, group in enumerate(self._groups):
            group.pool.check()
            refs = [0] * group.pool.num_blocks
            for block in group.pinned:
                refs[block] += 1
            for sequence in self._sequences.values():
                assert len(sequence.tables[i]) == -(-sequence.length // group.block_size), (
                    "a table has the wrong length"
                )
                assert sequence.committed <= sequence.length, "more tokens committed than allocated"
                for block in sequence.tables[i]:
                    refs[block] += 1
            assert refs == group.pool.refs, "reference counts differ from the tables"

    @staticmethod
    def _copies_on_write(group: _Group, sequence: _Allocation, table: list[int]) -> bool:
        return sequence.length % group.block_size != 0 and group.is_shared(table[-1])

    @staticmethod
    def _copy_last(group: _Group, table: list[int]) -> None:
        source, table[-1] = table[-1], group.pool.allocate()
        group.copies.append((source, table[-1]))
        if source in group.pinned:
            group.pool.release(source)
        else:
            group.pinned.add(source)  # the sequence's reference becomes the pin

    def _attach(self, sequence: _Allocation, hit: PrefixHit) -> None:
        if sequence.length:
            raise KVCacheError("a prefix hit is attached to a sequence that holds tokens; attach it to an empty one")
        for group, table, blocks in zip(self._groups, sequence.tables, hit.blocks, strict=True):
            for block in blocks:
                group.pool.share(block)
            table.extend(blocks)
        sequence.length = sequence.committed = hit.num_tokens
        sequence.snapshot = None


AllocatorFactory = Callable[[tuple[CacheGroup, ...], tuple[int, ...]], KVAllocator]


def find_allocator(name: str) -> AllocatorFactory:
    """The allocator of this name: "paged", or an entry point of group ``engine.kv_allocators``. KVCacheError if
    unknown."""
    if name == "paged":
        return PagedAllocator
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(sorted({"paged", *found}))
        raise KVCacheError(f"there is no KV allocator {name!r}; known are: {known}")
    factory: AllocatorFactory = found[name].load()
    return factory
