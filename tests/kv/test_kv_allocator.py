"""The paged allocator: directed cases, then a state machine whose blocks hold real tokens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import AdmissionError, KVCacheError
from engine.kv import CacheGroup, PagedAllocator, PoolStats


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


def test_misuse_is_named() -> None:
    allocator = paged()
    fill(allocator, 0, [1, 2, 3, 4, 5])
    fill(allocator, 1, [5])
    with pytest.raises(KVCacheError, match="only an empty one"):
        allocator.fork(0, 1)
    with pytest.raises(KVCacheError, match="attach it to an empty one"):
        allocator.allocate(1, 1, allocator.match(1, [1, 2, 3, 4, 5], 5))


class AllocatorMachine(RuleBasedStateMachine):
    """Blocks are lists of tokens, written as a device would. Every sequence must read its own tokens back, always."""

    @initialize(sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(3, 14)), min_size=1, max_size=2))
    def start(self, sizes: list[tuple[int, int]]) -> None:
        groups = tuple(CacheGroup(f"g{i}", "full", size) for i, (size, _) in enumerate(sizes))
        self.allocator = PagedAllocator(groups, tuple(number for _, number in sizes))
        self.memory: list[list[list[int | None]]] = [[[None] * size for _ in range(number)] for size, number in sizes]
        self.limit = min(size * (number - 1) for size, number in sizes)
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
            assert self.allocator.allocate(seq_id, count, hit) == fits
            if fits:
                self.tokens[seq_id] = known + new
                grown.append((seq_id, count))
        self.apply(self.allocator.take_copies())
        for seq_id, count in grown:
            self.write(seq_id, count)
        for seq_id, _ in grown:
            self.allocator.commit(seq_id, self.tokens[seq_id], len(self.tokens[seq_id]))

    def apply(self, copies: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        for memory, pairs in zip(self.memory, copies, strict=True):
            assert not {source for source, _ in pairs} & {target for _, target in pairs}
            for source, target in pairs:
                memory[target] = list(memory[source])

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
        child = self.next_id
        self.open()
        self.allocator.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])
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
            for memory, table in zip(self.memory, self.allocator.tables(seq_id), strict=True):
                assert 0 not in table
                assert [token for block in table for token in memory[block]][: len(tokens)] == tokens

    def teardown(self) -> None:
        for seq_id in sorted(self.tokens):
            self.allocator.close(seq_id)
        if self.tokens:
            self.allocator.check()
            assert all(pool.used == 0 for pool in self.allocator.stats())


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
