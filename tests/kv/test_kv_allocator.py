"""The paged allocator, case by case."""

from __future__ import annotations

import pytest

from engine.errors import AdmissionError, KVCacheError
from engine.kv import NULL_BLOCK, CacheGroup, PagedAllocator, PoolStats, PrefixHit


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
        CacheGroup("delta", "recurrent", 16)
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
