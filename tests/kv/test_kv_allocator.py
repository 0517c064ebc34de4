"""The paged allocator: directed cases, then a state machine, of the other two as well, whose blocks hold real tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import AdmissionError, KVCacheError
from engine.kv import (
    NULL_BLOCK,
    CacheGroup,
    ContiguousAllocator,
    PagedAllocator,
    PoolStats,
    PrefixHit,
    Remap,
    VirtualAllocator,
)


def paged(num_blocks: int = 9, block_size: int = 4) -> PagedAllocator:
    return PagedAllocator((CacheGroup("full", "full", block_size),), (num_blocks,))


def fill(allocator: PagedAllocator, seq_id: int, tokens: list[int]) -> None:
    """Opens a sequence and computes all its tokens."""
    allocator.open(seq_id, len(tokens))
    assert allocator.allocate(seq_id, len(tokens))
    allocator.take_copies()
    allocator.commit(seq_id, tokens, len(tokens))


def test_groups_are_validated() -> None:
    with pytest.raises(KVCacheError, match="block size"):
        CacheGroup("full", "full", 0)
    with pytest.raises(KVCacheError, match="window"):
        CacheGroup("swa", "window", 16)
    with pytest.raises(KVCacheError, match="window"):
        CacheGroup("full", "full", 16, window=128)
    with pytest.raises(KVCacheError, match="recurrent"):
        PagedAllocator((CacheGroup("ssm", "recurrent", 1),), (4,))
    with pytest.raises(KVCacheError, match="one for each"):
        PagedAllocator((CacheGroup("full", "full", 16),), (4, 4))


def test_open_refuses_what_could_never_fit() -> None:
    allocator = paged(num_blocks=4, block_size=4)
    allocator.open(0, 12)
    with pytest.raises(AdmissionError, match=r"13 tokens, which need 4 blocks of 4 .* has 3 \(12 tokens\)"):
        allocator.open(1, 13)
    with pytest.raises(KVCacheError, match="open already"):
        allocator.open(0, 1)


def test_blocks_come_on_demand_and_tables_are_snapshots() -> None:
    allocator = paged()
    allocator.open(0, 20)
    assert allocator.allocate(0, 3)
    first = allocator.tables(0)
    assert len(first[0]) == 1
    assert allocator.allocate(0, 1) and allocator.tables(0) is first
    assert allocator.allocate(0, 1)
    assert len(allocator.tables(0)[0]) == 2 and len(first[0]) == 1
    allocator.check()


def test_allocate_takes_all_or_nothing_in_every_group() -> None:
    groups = (CacheGroup("full", "full", 4), CacheGroup("swa", "window", 2, window=8))
    allocator = PagedAllocator(groups, (9, 6))
    allocator.open(0, 10)
    assert not allocator.can_fit(0, 11) and not allocator.allocate(0, 11)
    assert allocator.stats() == (PoolStats(8, 8, 0, 0), PoolStats(5, 5, 0, 0))
    assert allocator.can_fit(0, 10) and allocator.allocate(0, 10)
    assert [len(table) for table in allocator.tables(0)] == [3, 5]
    allocator.close(0)
    assert allocator.stats() == (PoolStats(8, 8, 0, 0), PoolStats(5, 5, 0, 0))
    allocator.check()


def test_a_hit_needs_a_commit_full_blocks_and_one_token_left() -> None:
    allocator = paged(block_size=4)
    tokens = list(range(10))
    allocator.open(0, 10)
    allocator.allocate(0, 10)
    allocator.open(1, 20)
    assert allocator.match(1, tokens, 10).num_tokens == 0
    allocator.commit(0, tokens, 7)
    assert allocator.match(1, tokens, 10).num_tokens == 4
    allocator.commit(0, tokens, 10)
    hit = allocator.match(1, tokens, 10)
    assert hit.num_tokens == 8 and hit.blocks == (allocator.tables(0)[0][:2],)
    assert allocator.match(1, tokens, 8).num_tokens == 4  # of 8 tokens, one is left to compute
    allocator.open(2, 20)
    assert allocator.match(2, [*tokens[:7], 99, 8, 9], 10).num_tokens == 4
    assert allocator.allocate(1, 2, hit)
    assert allocator.tables(1)[0][:2] == allocator.tables(0)[0][:2]
    assert allocator.tables(1)[0][2] != allocator.tables(0)[0][2]
    allocator.check()


def test_salts_are_worlds_apart() -> None:
    allocator = paged()
    fill(allocator, 0, list(range(8)))
    allocator.open(1, 8, salt=b"another adapter")
    assert allocator.match(1, list(range(8)), 8).num_tokens == 0


def test_cached_prefixes_survive_their_sequence_until_blocks_run_out_the_end_first() -> None:
    allocator = paged(num_blocks=5, block_size=4)
    tokens = list(range(16))
    fill(allocator, 0, tokens)
    allocator.close(0)
    assert allocator.stats() == (PoolStats(4, 0, 0, 4),)
    fill(allocator, 1, [99] * 4)
    allocator.open(2, 16)
    assert allocator.match(2, tokens, 16).num_tokens == 12
    fill(allocator, 3, [98] * 4)
    assert allocator.match(2, tokens, 16).num_tokens == 8
    allocator.check()


def test_a_hits_own_blocks_are_not_counted_as_free() -> None:
    allocator = paged(num_blocks=5, block_size=4)
    tokens = list(range(12))
    fill(allocator, 0, tokens)
    allocator.close(0)
    allocator.open(1, 16)
    hit = allocator.match(1, tokens, 12)
    assert hit.num_tokens == 8
    assert allocator.can_fit(1, 8, hit) and not allocator.can_fit(1, 9, hit)
    assert allocator.allocate(1, 8, hit)
    assert allocator.stats() == (PoolStats(4, 0, 4, 0),)
    allocator.check()


def test_hits_of_several_groups_end_on_a_boundary_of_all() -> None:
    groups = (CacheGroup("a", "full", 4), CacheGroup("b", "latent", 6))
    allocator = PagedAllocator(groups, (20, 20))
    tokens = list(range(40))
    fill(allocator, 0, tokens)
    allocator.open(1, 40)
    hit = allocator.match(1, tokens, 40)
    assert hit.num_tokens == 36 and [len(blocks) for blocks in hit.blocks] == [9, 6]
    assert allocator.match(1, tokens, 36).num_tokens == 24
    # Where one group's block is gone, the others follow.
    allocator._groups[1].pool.index.remove(allocator.tables(0)[1][3])
    hit = allocator.match(1, tokens, 40)
    assert hit.num_tokens == 12 and [len(blocks) for blocks in hit.blocks] == [3, 2]


def test_forks_share_and_copy_the_partial_block_on_write() -> None:
    allocator = paged(block_size=4)
    for seq_id in range(3):
        allocator.open(seq_id, 20)
    allocator.allocate(0, 6)
    allocator.fork(0, 1)
    allocator.fork(0, 2)
    full, partial = allocator.tables(0)[0]
    assert allocator.tables(1) == allocator.tables(2) == ((full, partial),)
    for seq_id in range(3):
        assert allocator.allocate(seq_id, 1)
    copies = allocator.take_copies()[0]
    assert [source for source, _ in copies] == [partial, partial]  # the last owner writes in place
    assert [allocator.tables(i)[0][1] for i in range(3)] == [copies[0][1], copies[1][1], partial]
    assert len({table[0] for i in range(3) for table in allocator.tables(i)}) == 1
    assert allocator.take_copies() == ((),)
    allocator.check()


def test_forks_on_a_block_boundary_copy_nothing() -> None:
    allocator = paged(block_size=4)
    allocator.open(0, 20)
    allocator.open(1, 20)
    allocator.allocate(0, 8)
    allocator.fork(0, 1)
    assert allocator.allocate(0, 1) and allocator.allocate(1, 1)
    assert allocator.take_copies() == ((),)
    assert allocator.tables(0)[0][:2] == allocator.tables(1)[0][:2]
    assert allocator.tables(0)[0][2] != allocator.tables(1)[0][2]


def test_a_copys_source_is_not_given_out_before_the_step_ends() -> None:
    allocator = paged(num_blocks=4, block_size=4)
    for seq_id in range(3):
        allocator.open(seq_id, 12)
    allocator.allocate(0, 2)
    allocator.fork(0, 1)
    source = allocator.tables(0)[0][0]
    allocator.allocate(1, 1)
    allocator.free(0)
    assert allocator.can_fit(2, 4) and not allocator.can_fit(2, 5)
    allocator.check()
    assert allocator.take_copies() == (((source, allocator.tables(1)[0][0]),),)
    assert allocator.can_fit(2, 8)
    allocator.check()


def windowed(window: int, num_blocks: int = 20, block_size: int = 4, chunk: int | None = None) -> PagedAllocator:
    return PagedAllocator((CacheGroup("swa", "window", block_size, window),), (num_blocks,), chunk)


def test_blocks_behind_the_window_are_given_back() -> None:
    allocator = windowed(6)
    allocator.open(0, 40)
    assert allocator.allocate(0, 12)
    first = allocator.tables(0)[0]
    assert NULL_BLOCK not in first and len(first) == 3
    assert allocator.allocate(0, 1)  # at position 12 it sees 7 to 12: the first block is behind, the second is not
    assert allocator.tables(0)[0][:3] == (NULL_BLOCK, *first[1:]) and first[0] != NULL_BLOCK
    assert allocator.stats()[0].used == 3
    for _ in range(26):
        assert allocator.allocate(0, 1)
        allocator.check()
        assert allocator.stats()[0].used <= 3
    assert len(allocator.tables(0)[0]) == 10
    allocator.close(0)
    assert allocator.stats() == (PoolStats(19, 19, 0, 0),)


def test_a_window_of_one_keeps_the_block_that_is_written() -> None:
    allocator = windowed(1, block_size=4)
    allocator.open(0, 20)
    for length in range(1, 21):
        assert allocator.allocate(0, 1)
        assert sum(block != NULL_BLOCK for block in allocator.tables(0)[0]) == 1, length
        allocator.check()


def test_what_a_chunk_and_a_window_hold_bounds_what_is_admitted() -> None:
    allocator = windowed(8, num_blocks=5, chunk=8)  # 8 + 8 - 1 tokens lie in at most 5 blocks of 4
    with pytest.raises(AdmissionError, match="need 5 blocks"):
        allocator.open(0, 100)
    allocator = windowed(8, num_blocks=6, chunk=8)
    allocator.open(0, 100)
    assert allocator.can_fit(0, 100)
    for _ in range(12):
        assert allocator.allocate(0, 8)
        allocator.check()
    assert not windowed(8, num_blocks=6, chunk=None)._groups[0].spec.most_blocks(24) <= 5


def test_a_hit_in_a_window_needs_its_last_blocks_alone() -> None:
    allocator = windowed(6)
    tokens = list(range(30))
    fill(allocator, 0, tokens)
    table = allocator.tables(0)[0]
    allocator.close(0)
    pool = allocator._groups[0].pool
    for block in table[:3]:
        pool.index.remove(block)
        pool._cached -= 1
    allocator.open(1, 40)
    hit = allocator.match(1, tokens, 30)
    assert hit == PrefixHit(28, ((NULL_BLOCK,) * 5 + table[5:7],))  # the token at 28 sees 23 to 28
    assert allocator.allocate(1, 2, hit)
    allocator.check()
    # Of 20 tokens the last 5 are in blocks 3 and 4; of 16 those in block 2 are gone.
    allocator.open(2, 40)
    assert allocator.match(2, tokens, 21).num_tokens == 20
    assert allocator.match(2, tokens, 18).num_tokens == 0


def test_a_full_group_and_a_window_are_hit_together() -> None:
    groups = (CacheGroup("full", "full", 4), CacheGroup("swa", "window", 4, 6))
    allocator = PagedAllocator(groups, (20, 20))
    tokens = list(range(30))
    fill(allocator, 0, tokens)
    full, window = allocator.tables(0)
    allocator.open(1, 40)
    assert allocator.match(1, tokens, 30) == PrefixHit(28, (full[:7], (NULL_BLOCK,) * 5 + window[5:7]))
    allocator._groups[1].pool.index.remove(window[5])
    assert allocator.match(1, tokens, 30).num_tokens == 20  # 24 tokens need block 5 of the window
    allocator._groups[0].pool.index.remove(full[2])
    assert allocator.match(1, tokens, 30).num_tokens == 8


def test_a_block_given_back_before_its_commit_is_not_registered() -> None:
    allocator = windowed(2)
    allocator.open(0, 40)
    assert allocator.allocate(0, 8) and allocator.allocate(0, 8)  # the second step is scheduled before the first ends
    allocator.commit(0, list(range(16)), 8)
    allocator.commit(0, list(range(16)), 16)
    allocator.check()
    allocator.open(1, 40)
    assert allocator.match(1, list(range(16)), 9).num_tokens == 8
    assert allocator.match(1, list(range(16)), 5).num_tokens == 0  # the first block may hold anything by now


def test_a_block_behind_the_window_that_another_holds_makes_no_room() -> None:
    allocator = PagedAllocator((CacheGroup("swa", "window", 2, 4),), (4,))
    fill(allocator, 0, list(range(6)))
    allocator.open(1, 6)
    allocator.fork(0, 1)
    assert not allocator.can_fit(0, 1) and not allocator.allocate(0, 1)
    allocator.check()
    allocator.free(1)
    assert allocator.can_fit(0, 1) and allocator.allocate(0, 1)


def test_what_was_swapped_out_comes_back_in_fresh_blocks() -> None:
    groups = (CacheGroup("full", "full", 4), CacheGroup("swa", "window", 4, 6))
    allocator = PagedAllocator(groups, (8, 8))
    tokens = list(range(14))
    fill(allocator, 0, tokens)
    allocator.free(0)
    fill(allocator, 1, [99])
    assert allocator.allocate(0, 1, PrefixHit(14, ((), ())))
    full, window = allocator.tables(0)
    assert len(full) == 4 and window[:2] == (NULL_BLOCK,) * 2 and NULL_BLOCK not in window[2:]
    allocator.commit(0, [*tokens, 7], 15)
    allocator.check()
    allocator.open(2, 15)
    assert allocator.match(2, tokens, 14).num_tokens == 12


def test_misuse_is_named() -> None:
    allocator = paged()
    fill(allocator, 0, [1, 2, 3, 4, 5])
    fill(allocator, 1, [5])
    with pytest.raises(KVCacheError, match="only an empty one"):
        allocator.fork(0, 1)
    with pytest.raises(KVCacheError, match="attach it to an empty one"):
        allocator.allocate(1, 1, allocator.match(1, [1, 2, 3, 4, 5], 5))


class AllocatorMachine(RuleBasedStateMachine):
    """Blocks are lists of tokens, written as a device would. Every sequence must read its own tokens back, always. Blocks that
    are not mapped are None."""

    @initialize(
        sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(3, 14)), min_size=1, max_size=2),
        windows=st.lists(st.none() | st.integers(1, 9), min_size=2, max_size=2),
        kind=st.sampled_from(["paged", "contiguous", "virtual"]),
        pages=st.lists(st.integers(1, 3), min_size=2, max_size=2),
        spaces=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    )
    def start(
        self,
        sizes: list[tuple[int, int]],
        windows: list[int | None],
        kind: str,
        pages: list[int],
        spaces: list[int],
    ) -> None:
        limited = windows if kind == "paged" else [None, None]
        self.pages = pages[: len(sizes)] if kind == "virtual" else [1] * len(sizes)
        sizes = [(size, number * page) for (size, number), page in zip(sizes, self.pages, strict=True)]
        self.groups = tuple(
            CacheGroup(f"g{i}", "window" if window else "full", size, window)
            for i, ((size, _), window) in enumerate(zip(sizes, limited, strict=False))
        )
        self.kind = kind
        self.numbers = tuple(number for _, number in sizes)
        self.memory: list[list[list[int | None] | None]] = [
            [[None] * size for _ in range(number)] for size, number in sizes
        ]
        if kind == "virtual":
            spaces = [number * many for number, many in zip(self.numbers, spaces, strict=False)]
            self.allocator = VirtualAllocator(self.groups, self.numbers, tuple(self.pages), tuple(spaces))
            for memory, page, space, (size, _) in zip(self.memory, self.pages, spaces, sizes, strict=True):
                memory[:] = [[None] * size if block < page else None for block in range(space)]
        else:
            make = ContiguousAllocator if kind == "contiguous" else PagedAllocator
            self.allocator = make(self.groups, self.numbers)
        self.limit = min(size * (number - page) for (size, number), page in zip(sizes, self.pages, strict=True))
        self.begins: dict[int, list[int]] = {}  # where the tables of each sequence began when it had tokens first
        self.tokens: dict[int, list[int]] = {}  # what each sequence holds
        self.planned: dict[int, list[int]] = {}  # what one that holds nothing begins with: its tokens never change
        self.next_id = 0

    @rule()
    def open(self) -> None:
        self.allocator.open(self.next_id, self.limit)
        self.tokens[self.next_id] = []
        self.next_id += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some sequences get tokens, new ones after a prefix hit; then copies, writes, commits."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, max_size=4))
        grown: list[tuple[int, int]] = []
        for seq_id in chosen:
            known = self.tokens[seq_id]
            new = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
            if len(known) + len(new) > self.limit:
                continue
            hit = None
            if not known:
                new = self.planned.setdefault(seq_id, new)
                hit = self.allocator.match(seq_id, new, len(new))
            count = len(new) - (hit.num_tokens if hit else 0)
            fits = self.allocator.can_fit(seq_id, count, hit)
            done = self.allocator.allocate(seq_id, count, hit)
            assert done == fits or (self.kind == "contiguous" and done)  # it takes back what others only reserve
            if done:
                self.tokens[seq_id] = known + new
                grown.append((seq_id, count))
        self.apply()
        for seq_id, count in grown:
            self.write(seq_id, count)
        for seq_id, _ in grown:
            self.allocator.commit(seq_id, self.tokens[seq_id], len(self.tokens[seq_id]))

    def apply(self) -> None:
        copies = self.allocator.take_copies()
        if self.kind == "virtual":
            self.remap(self.allocator.take_remaps())
        for memory, pairs in zip(self.memory, copies, strict=True):
            assert not {source for source, _ in pairs} & {target for _, target in pairs}
            for source, target in pairs:
                memory[target] = list(memory[source])

    def remap(self, remaps: tuple[Remap, ...]) -> None:
        for memory, number, page, remap, group in zip(
            self.memory, self.numbers, self.pages, remaps, self.groups, strict=bool(remaps)
        ):
            for runs, now in ((remap.unmapped, None), (remap.mapped, [None] * group.block_size)):
                assert all(sum(one) < other[0] for one, other in pairwise(runs)), "a run is two"
                for first, count in runs:
                    assert first >= page and first % page == count % page == 0 < count
                    for block in range(first, first + count):
                        assert (memory[block] is None) != (now is None)
                        memory[block] = None if now is None else list(now)
            assert sum(block is not None for block in memory) <= number, "more is mapped than there is memory"

    def write(self, seq_id: int, count: int) -> None:
        tokens = self.tokens[seq_id]
        for memory, table in zip(self.memory, self.allocator.tables(seq_id), strict=True):
            size = len(memory[0])
            for position in range(len(tokens) - count, len(tokens)):
                memory[table[position // size]][position % size] = tokens[position]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.tokens)))
        if not self.allocator.can_fork(parent, 1):
            return
        child = self.next_id
        self.open()
        self.allocator.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])
        self.apply()
        if parent in self.planned:
            self.planned[child] = self.planned[parent]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), close=st.booleans())
    def free(self, data: st.DataObject, close: bool) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        if close:
            self.allocator.close(seq_id)
            del self.tokens[seq_id]
        else:
            self.allocator.free(seq_id)
            assert not any(self.allocator.tables(seq_id))
            if self.tokens[seq_id]:
                self.planned[seq_id] = self.tokens[seq_id]
            self.tokens[seq_id] = []

    @invariant()
    def reads_back(self) -> None:
        self.allocator.check()
        for seq_id, tokens in self.tokens.items():
            for group, memory, table in zip(self.groups, self.memory, self.allocator.tables(seq_id), strict=True):
                # What the next token sees; more may be there, but for the null block.
                first = group.behind(len(tokens)) * group.block_size
                assert all(memory[block] is not None for block in table), "a block without memory"
                read = [token for block in table for token in memory[block]]
                assert read[first : len(tokens)] == tokens[first:]
                assert NULL_BLOCK not in table[group.behind(len(tokens)) :]
                if self.kind != "paged":
                    assert table == tuple(range(table[0], table[0] + len(table))) if table else True

    @invariant()
    def has_its_own_pages_and_never_moves(self) -> None:
        if self.kind != "virtual":
            return
        for number, page in enumerate(self.pages):
            tables = [self.allocator.tables(seq_id)[number] for seq_id in self.tokens]
            pages = [page_of for table in tables for page_of in {block // page for block in table}]
            assert len(pages) == len(set(pages)) and 0 not in pages, "a page has two owners"
        for seq_id, tokens in self.tokens.items():
            begin = [table[0] for table in self.allocator.tables(seq_id) if table]
            assert not tokens or self.begins.setdefault(seq_id, begin) == begin, "a sequence has moved"
            if not tokens:
                self.begins.pop(seq_id, None)
        assert all(found.moves == 0 for found in self.allocator.fragmentation())

    @precondition(lambda self: self.kind == "virtual")
    @rule()
    def lose(self) -> None:
        """The device lost its state: all that ran is computed again, in memory that is mapped anew."""
        for seq_id, tokens in self.tokens.items():
            if tokens:
                self.allocator.free(seq_id)
                self.planned[seq_id] = tokens
            self.tokens[seq_id] = []
        self.allocator.forget()
        for memory, page, group in zip(self.memory, self.pages, self.groups, strict=True):
            memory[:] = [[None] * group.block_size if block < page else None for block in range(len(memory))]

    def teardown(self) -> None:
        for seq_id in sorted(self.tokens):
            self.allocator.close(seq_id)
        if self.tokens:
            self.allocator.check()
            assert all(pool.used == 0 for pool in self.allocator.stats())


AllocatorMachine.TestCase.settings = settings(max_examples=90, stateful_step_count=30, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
