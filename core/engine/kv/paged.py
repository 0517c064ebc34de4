"""Paged attention's allocator (Kwon et al. 2023, arXiv 2309.06180): blocks on demand, shared by reference count, copied on
the first write to a shared, partially filled block.

In a group with a window, blocks that no later query sees are given back while the sequence runs, and a prefix is hit where
the blocks of its last window are cached, whatever has become of those before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import lcm

from ..errors import KVCacheError
from .allocator import BlockCopy, BlockTable, PrefixHit
from .block_pool import NULL_BLOCK, BlockPool, PoolStats
from .cache_group import CacheGroup, check_pools
from .prefix_index import HashChain


@dataclass(eq=False)
class _Allocation:
    """What one sequence holds. ``length``: tokens allocated, written or about to be. ``freed``: how many of each table's
    first entries are the null block. ``steady``: up to so many tokens nothing but the length changes; ``full_at``: with so many
    computed another block can be found by its tokens. Most decode steps are before both."""

    chains: dict[int, HashChain]
    tables: list[list[int]]
    freed: list[int]
    length: int = 0
    committed: int = 0
    steady: int = 0
    full_at: int = 0
    snapshot: tuple[BlockTable, ...] | None = None


@dataclass
class _Group:
    """A cache group with its pool and the copies of the step being built. ``pinned``: their sources, which hold one
    reference more, so that no block is written and copied from by the same step's copies."""

    spec: CacheGroup
    pool: BlockPool
    copies: list[BlockCopy] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    def is_shared(self, block: int) -> bool:
        return self.pool.refs[block] - (block in self.pinned) > 1


class PagedAllocator:
    """Blocks on demand, a pool a group. ``num_blocks`` counts each group's blocks, the null block included; ``max_chunk``
    is the most tokens of a sequence that a step computes, which bounds what a sequence holds in a group with a window.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], num_blocks: tuple[int, ...], max_chunk: int | None = None
    ) -> None:
        check_pools(groups, num_blocks)
        self.groups = groups
        self._max_chunk = max_chunk
        self._groups = [_Group(g, BlockPool(n)) for g, n in zip(groups, num_blocks, strict=True)]
        self._hit_unit = lcm(*(g.block_size for g in groups))
        self._sequences: dict[int, _Allocation] = {}

    def open(self, seq_id: int, limit: int, salt: bytes = b"", prompt: int = 0) -> None:
        if seq_id in self._sequences:
            raise KVCacheError(f"sequence {seq_id} is open already; sequence ids are unique while in use")
        for spec, group in zip(self.groups, self._groups, strict=True):
            spec.check_room(limit, spec.most_blocks(limit, self._max_chunk), group.pool.num_blocks - 1)
        chains = {s: HashChain(s, salt) for s in {group.block_size for group in self._groups}}
        self._sequences[seq_id] = _Allocation(chains, [[] for _ in self._groups], [0] * len(self._groups))

    def match(self, seq_id: int, token_ids: list[int], limit: int) -> PrefixHit:
        chains = self._sequences[seq_id].chains
        found: list[list[int]] = []
        length = (limit - 1) // self._hit_unit * self._hit_unit
        for group in self._groups:
            blocks = length // group.block_size
            chain = chains[group.block_size]
            chain.extend(token_ids, blocks)
            if group.spec.window is None:
                found.append(group.pool.index.lookup(chain.keys[:blocks]))
                length = min(length, len(found[-1]) * group.block_size)
            else:
                found.append(group.pool.index.find(chain.keys[:blocks]))
        # A hit ends on a block boundary in every group: the last block of a hit is never written to.
        length = self._longest_hit(found, length // self._hit_unit * self._hit_unit)
        hits = zip(self._groups, found, strict=True)
        return PrefixHit(length, tuple(_seen(group.spec, blocks, length) for group, blocks in hits))

    def _longest_hit(self, found: list[list[int]], length: int) -> int:
        """The most tokens, up to ``length``, for which each group with a window has all blocks that the next query sees."""
        windowed = [
            (group.spec, list(accumulate(blocks, lambda run, block: run + 1 if block else 0, initial=0)))
            for group, blocks in zip(self._groups, found, strict=True)
            if group.spec.window is not None
        ]
        while any(runs[spec.blocks(length)] < spec.blocks(length) - spec.behind(length) for spec, runs in windowed):
            length -= self._hit_unit
        return length

    def can_fit(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        sequence = self._sequences[seq_id]
        for i, group in enumerate(self._groups):
            needed = self._needed(i, sequence, count, hit)
            if self._max_chunk is not None and count > self._max_chunk:
                # Over several steps blocks are given back between them; those shared with others are not.
                length = sequence.length + count + (hit.num_tokens if hit else 0)
                needed = min(needed, group.spec.most_blocks(length, self._max_chunk))
            if needed > group.pool.available:
                return False
        return True

    def _needed(self, i: int, sequence: _Allocation, count: int, hit: PrefixHit | None) -> int:
        """Blocks that must leave the free list for ``count`` more tokens in one step, less those given back before."""
        group, table = self._groups[i], sequence.tables[i]
        refs = group.pool.refs
        if hit and hit.num_tokens:
            first = group.spec.behind(hit.num_tokens)
            # Cached blocks of the hit count too: they leave the free list.
            in_use = sum(block != NULL_BLOCK and refs[block] > 0 for block in hit.blocks[i])
            return group.spec.blocks(hit.num_tokens + count) - first - in_use
        gone = table[sequence.freed[i] : group.spec.behind(sequence.length)]
        missing = group.spec.blocks(sequence.length + count) - len(table)
        return missing + self._copies_on_write(group, sequence, table) - sum(refs[block] == 1 for block in gone)

    def allocate(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        sequence = self._sequences[seq_id]
        end = sequence.length + count
        if hit is None and end <= sequence.steady:
            sequence.length = end
            return True
        if any(self._needed(i, sequence, count, hit) > g.pool.available for i, g in enumerate(self._groups)):
            return False
        if hit and hit.num_tokens:
            self._attach(sequence, hit)
        end = sequence.length + count
        for i, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            self._free_behind(i, sequence)
            if self._copies_on_write(group, sequence, table):
                self._copy_last(group, table)
                sequence.snapshot = None
            missing = group.spec.blocks(end) - len(table)
            if missing > 0:
                table.extend(group.pool.allocate() for _ in range(missing))
                sequence.snapshot = None
        sequence.length = end
        tables = zip(self.groups, sequence.tables, sequence.freed, strict=True)
        sequence.steady = min(spec.steady(len(table), freed) for spec, table, freed in tables)
        return True

    def _free_behind(self, i: int, sequence: _Allocation) -> None:
        """Gives back what the queries from ``length`` on do not see. Steps before this one may read it yet, and do so
        before it is written to again."""
        group, table = self._groups[i], sequence.tables[i]
        behind = group.spec.behind(sequence.length)
        for index in range(sequence.freed[i], behind):
            group.pool.release(table[index])
            table[index] = NULL_BLOCK
            sequence.snapshot = None
        sequence.freed[i] = max(sequence.freed[i], behind)

    def tables(self, seq_id: int) -> tuple[BlockTable, ...]:
        sequence = self._sequences[seq_id]
        if sequence.snapshot is None:
            sequence.snapshot = tuple(tuple(table) for table in sequence.tables)
        return sequence.snapshot

    def can_fork(self, parent: int, children: int) -> bool:
        return all(group.pool.available > children for group in self._groups)

    def fork(self, parent: int, child: int) -> None:
        """They share all blocks until one of them writes to the last, partially filled one."""
        source, sequence = self._sequences[parent], self._sequences[child]
        if sequence.length:
            raise KVCacheError(f"sequence {child} holds {sequence.length} tokens; only an empty one can become a fork")
        for group, table, freed in zip(self._groups, source.tables, source.freed, strict=True):
            for block in table[freed:]:
                group.pool.share(block)
        sequence.tables, sequence.freed = [list(table) for table in source.tables], list(source.freed)
        sequence.chains = {size: chain.fork(source.length // size) for size, chain in source.chains.items()}
        sequence.length, sequence.committed, sequence.snapshot = source.length, source.committed, source.snapshot
        source.steady = 0  # its last block is shared

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
        if num_computed >= sequence.full_at:
            self._index(sequence, token_ids, num_computed)
        sequence.committed = num_computed

    def _index(self, sequence: _Allocation, token_ids: list[int], num_computed: int) -> None:
        """Has the blocks that are full found by their tokens."""
        for group, table in zip(self._groups, sequence.tables, strict=True):
            first, last = sequence.committed // group.block_size, num_computed // group.block_size
            if first < last:
                chain = sequence.chains[group.block_size]
                chain.extend(token_ids, last)
                for i in range(first, last):
                    if table[i] != NULL_BLOCK:  # else a later step has given it back already
                        group.pool.index.insert(chain.keys[i], table[i])
        sequence.full_at = min((num_computed // group.block_size + 1) * group.block_size for group in self._groups)

    def rewind(self, seq_id: int, num_tokens: int) -> None:
        sequence = self._sequences[seq_id]
        for group, table in zip(self._groups, sequence.tables, strict=True):
            while len(table) > group.spec.blocks(num_tokens):
                group.pool.release(table.pop())
                sequence.snapshot = None
        sequence.length, sequence.steady = num_tokens, 0

    def free(self, seq_id: int) -> None:
        sequence = self._sequences[seq_id]
        for i, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            # Last block first: of a cached prefix the end is evicted before the beginning, which others may share.
            for block in reversed(table[sequence.freed[i] :]):
                group.pool.release(block)
            table.clear()
            sequence.freed[i] = 0
        sequence.length = sequence.committed = sequence.steady = sequence.full_at = 0
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
                table, freed = sequence.tables[i], sequence.freed[i]
                assert len(table) == group.spec.blocks(sequence.length), "a table has the wrong length"
                assert freed <= group.spec.behind(sequence.length), "a block was given back that a query still sees"
                assert table[:freed] == [NULL_BLOCK] * freed and NULL_BLOCK not in table[freed:]
                assert sequence.committed <= sequence.length, "more tokens committed than allocated"
                if sequence.length < sequence.steady:
                    assert freed == group.spec.behind(sequence.steady - 1) and not group.is_shared(table[-1])
                for block in table[freed:]:
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
        for i, (group, table, blocks) in enumerate(zip(self._groups, sequence.tables, hit.blocks, strict=True)):
            sequence.freed[i] = behind = group.spec.behind(hit.num_tokens)
            if blocks:
                for block in blocks[behind:]:
                    group.pool.share(block)
                table.extend(blocks)
                sequence.committed = hit.num_tokens
            else:
                fresh = (group.pool.allocate() for _ in range(group.spec.blocks(hit.num_tokens) - behind))
                table.extend((*(NULL_BLOCK for _ in range(behind)), *fresh))
        sequence.length = hit.num_tokens
        sequence.snapshot = None


def _seen(spec: CacheGroup, blocks: list[int], length: int) -> BlockTable:
    """The blocks of a prefix, with the null block for those that no query after it sees."""
    behind = spec.behind(length)
    return (NULL_BLOCK,) * behind + tuple(blocks[behind : length // spec.block_size])
