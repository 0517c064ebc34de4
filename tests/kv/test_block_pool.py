"""The block pool and the prefix index: directed cases, then a state machine against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import KVCacheError
from engine.kv import NULL_BLOCK, BlockPool, HashChain, PoolStats, PrefixIndex


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(KVCacheError, match="all 3 blocks"):
        pool.allocate()
    with pytest.raises(KVCacheError):
        pool.release(NULL_BLOCK)
    with pytest.raises(KVCacheError):
        pool.share(NULL_BLOCK)
    assert pool.stats() == PoolStats(total=3, free=0, used=3, cached=0)
    pool.check()


def test_a_pool_without_room_is_refused() -> None:
    with pytest.raises(KVCacheError, match="null block"):
        BlockPool(1)


def test_cached_blocks_are_evicted_last_and_least_recently_used_first() -> None:
    pool = BlockPool(5)
    a, b, c, d = (pool.allocate() for _ in range(4))
    pool.index.insert(b"a", a)
    pool.index.insert(b"b", b)
    for block in (a, c, b, d):
        pool.release(block)
    assert pool.stats() == PoolStats(total=4, free=2, used=0, cached=2)
    assert {pool.allocate(), pool.allocate()} == {c, d}  # nothing to keep in them
    assert pool.index.lookup([b"a"]) == [a]
    assert pool.allocate() == a  # released before b
    assert pool.index.lookup([b"a"]) == [] and pool.index.lookup([b"b"]) == [b]
    pool.check()


def test_a_shared_cached_block_leaves_the_free_list() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.index.insert(bytes([block]), block)
        pool.release(block)
    middle = blocks[1]
    pool.share(middle)
    assert {pool.allocate(), pool.allocate()} == {blocks[0], blocks[2]}
    assert pool.available == 0 and pool.index.lookup([bytes([middle])]) == [middle]
    pool.check()


def test_free_blocks_without_a_prefix_cannot_be_shared() -> None:
    pool = BlockPool(3)
    with pytest.raises(KVCacheError, match="holds nothing"):
        pool.share(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(KVCacheError, match="more often"):
        pool.release(block)


def test_chained_keys_name_the_whole_prefix() -> None:
    def keys(tokens: list[int], salt: bytes = b"") -> list[bytes]:
        chain = HashChain(2, salt)
        chain.extend(tokens, len(tokens) // 2)
        return chain.keys

    assert keys([1, 2, 3, 4]) == keys([1, 2, 3, 4, 5])
    assert keys([1, 2, 3, 4])[1] != keys([9, 2, 3, 4])[1]  # same block, another beginning
    assert not set(keys([1, 2, 1, 2])[1:]) & set(keys([1, 2, 1, 2])[:1])
    assert not set(keys([1, 2, 3, 4])) & set(keys([1, 2, 3, 4], b"tenant"))
    # Packed at a fixed width, so that digits of one token cannot pass for another.
    assert keys([1, 256]) != keys([257, 0])


def test_a_chain_grows_as_if_hashed_at_once_and_forks() -> None:
    tokens = list(range(12))
    whole, grown = HashChain(3, b"s"), HashChain(3, b"s")
    whole.extend(tokens, 4)
    for blocks in range(5):
        grown.extend(tokens, blocks)
    assert grown.keys == whole.keys
    fork = whole.fork(2)
    fork.extend([*tokens[:6], 99, 99, 99], 3)
    assert fork.keys[:2] == whole.keys[:2] and fork.keys[2] != whole.keys[2]
    empty = whole.fork(0)
    empty.extend(tokens, 4)
    assert empty.keys == whole.keys and len(whole.keys) == 4


def test_the_first_of_equal_blocks_stays_in_the_index() -> None:
    index = PrefixIndex()
    index.insert(b"k", 1)
    index.insert(b"k", 2)
    index.insert(b"other", 1)
    assert index.lookup([b"k", b"other"]) == [1] and len(index) == 1
    index.remove(1)
    assert len(index) == 0 and 1 not in index
    index.check()


class PoolMachine(RuleBasedStateMachine):
    """References held by a crowd of owners, some of whose blocks are registered."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[int] = []
        self.registered: dict[bytes, int] = {}
        self.keys = 0

    @precondition(lambda self: self.pool.available)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.held and block != NULL_BLOCK
        self.registered = {key: b for key, b in self.registered.items() if b != block}
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        key = data.draw(st.sampled_from([*self.registered, b"new %d" % self.keys]))
        self.keys += 1
        self.pool.index.insert(key, block)
        if key not in self.registered and block not in self.registered.values():
            self.registered[key] = block

    @precondition(lambda self: self.held or self.registered)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([*self.held, *self.registered.values()]))
        self.pool.share(block)
        self.held.append(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.registered.clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.refs == [self.held.count(block) for block in range(self.pool.num_blocks)]
        for key, block in self.registered.items():
            assert self.pool.index.lookup([key]) == [block]
        cached = sum(block not in self.held for block in self.registered.values())
        total = self.pool.num_blocks - 1
        used = len(set(self.held))
        assert self.pool.stats() == PoolStats(total, total - used - cached, used, cached)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
