"""The contiguous allocator: where sequences are put, how they grow, and what is predicted of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import AdmissionError, KVCacheError
from engine.kv import CacheGroup, ContiguousAllocator, HostPool, LengthHistogram, PoolStats
from engine.kv.extents import ExtentPool


class Known:
    """Predicts what it is told."""

    def __init__(self, output: int) -> None:
        self.output = output
        self.seen: list[tuple[int, int]] = []

    def predict(self, prompt: int, output: int) -> int:
        return max(self.output, output)

    def observe(self, prompt: int, output: int) -> None:
        self.seen.append((prompt, output))


def contiguous(blocks: int = 20, output: int = 0, block_size: int = 4) -> ContiguousAllocator:
    groups = (CacheGroup("full", "full", block_size),)
    return ContiguousAllocator(groups, (blocks + 1,), Known(output))


def start(allocator: ContiguousAllocator, seq_id: int, prompt: int, limit: int = 32) -> tuple[int, ...]:
    allocator.open(seq_id, limit, prompt=prompt)
    assert allocator.allocate(seq_id, prompt)
    allocator.take_copies()
    return allocator.tables(seq_id)[0]


def test_what_it_takes() -> None:
    with pytest.raises(KVCacheError, match="takes full and latent groups"):
        ContiguousAllocator((CacheGroup("swa", "window", 4, 8),), (4,))
    with pytest.raises(KVCacheError, match="one for each"):
        ContiguousAllocator((CacheGroup("full", "full", 4),), ())
    allocator = contiguous(blocks=3)
    with pytest.raises(AdmissionError, match=r"need 4 blocks of 4 .* has 3 \(12 tokens\)"):
        allocator.open(0, 13)
    allocator.open(0, 12)
    with pytest.raises(KVCacheError, match="open already"):
        allocator.open(0, 1)


def test_room_is_reserved_for_what_is_predicted_and_no_more_than_the_limit() -> None:
    allocator = contiguous(output=20)
    assert start(allocator, 0, 8, limit=80) == (1, 2)
    assert start(allocator, 1, 4, limit=80) == (8,)
    assert start(allocator, 2, 4, limit=8) == (14,)
    assert allocator.stats() == (PoolStats(20, 5, 15, 0),)
    for length in range(9, 29):
        assert allocator.allocate(0, 1), length
    assert allocator.tables(0)[0] == tuple(range(1, 8))
    allocator.check()


def test_best_fit_is_the_shortest_extent_that_is_long_enough() -> None:
    allocator = contiguous(blocks=20)
    for seq_id, blocks in enumerate((5, 1, 3, 1, 4, 1)):
        start(allocator, seq_id, blocks * 4)
    for seq_id in (0, 2, 4):
        allocator.close(seq_id)  # holes of 5, 3 and 4 blocks, and 5 at the end
    assert start(allocator, 10, 16) == (11, 12, 13, 14)
    assert start(allocator, 11, 12) == (7, 8, 9)
    assert start(allocator, 12, 8) == (1, 2)
    allocator.open(13, 24)
    assert allocator.stats() == (PoolStats(20, 8, 12, 0),)
    assert allocator.can_fit(13, 20) and not allocator.can_fit(13, 21), "of 8 free blocks 5 are beside each other"


def test_growth_is_in_place_where_the_neighbour_is_free_and_a_move_elsewhere() -> None:
    allocator = contiguous(blocks=12)
    start(allocator, 0, 8)
    assert allocator.allocate(0, 4) and allocator.tables(0)[0] == (1, 2, 3)
    start(allocator, 1, 4)
    assert allocator.allocate(0, 4)
    assert allocator.tables(0)[0] == (5, 6, 7, 8)
    assert allocator.take_copies() == (((1, 5), (2, 6), (3, 7)),)
    allocator.check()


def test_what_is_copied_from_is_free_only_after_the_step() -> None:
    allocator = contiguous(blocks=8)
    start(allocator, 0, 8)
    start(allocator, 1, 4)
    assert allocator.allocate(0, 4)  # from 1 and 2 to 4, 5 and 6
    allocator.open(2, 8)
    assert not allocator.can_fit(2, 9) and allocator.can_fit(2, 8)
    assert allocator.allocate(2, 8) and allocator.tables(2)[0] == (7, 8)
    allocator.check()
    allocator.take_copies()
    assert allocator.stats() == (PoolStats(8, 2, 6, 0),)


def test_reservations_are_taken_back_before_anybody_is_preempted() -> None:
    groups, known = (CacheGroup("full", "full", 4),), Known(28)
    allocator = ContiguousAllocator(groups, (11,), known)
    start(allocator, 0, 4, limit=40)  # 8 blocks, of which it needs 1
    known.output = 4
    start(allocator, 1, 4, limit=40)
    allocator.open(2, 8)
    assert not allocator.can_fit(2, 4) and not allocator.allocate(2, 4), "a newcomer takes nothing from others"
    assert allocator.allocate(1, 4) and allocator.tables(1)[0] == (9, 10)
    assert allocator.allocate(1, 4) and allocator.tables(1)[0] == (2, 3, 4)
    assert allocator.take_copies() == (((9, 2), (10, 3)),)
    assert allocator.stats() == (PoolStats(10, 6, 4, 0),)
    allocator.check()


def test_a_fork_is_a_copy() -> None:
    allocator = contiguous()
    start(allocator, 0, 10)
    allocator.open(1, 40, prompt=10)
    assert allocator.can_fork(0, 1)
    allocator.fork(0, 1)
    assert allocator.tables(1)[0] == (4, 5, 6)
    assert allocator.allocate(0, 1) and allocator.allocate(1, 1)
    assert allocator.take_copies() == (((1, 4), (2, 5), (3, 6)),)
    allocator.check()
    assert not allocator.can_fork(0, 5) and allocator.can_fork(0, 3)


def test_a_fork_of_a_fork_copies_what_is_there_already() -> None:
    allocator = contiguous()
    start(allocator, 0, 6)
    for child in (1, 2):
        allocator.open(child, 40, prompt=6)
        allocator.fork(child - 1, child)
    assert allocator.take_copies() == (((1, 3), (2, 4), (1, 5), (2, 6)),)


def test_copies_to_what_is_freed_meanwhile_are_left_out() -> None:
    allocator = contiguous()
    start(allocator, 0, 6)
    allocator.open(1, 40, prompt=6)
    allocator.fork(0, 1)
    allocator.close(0)
    allocator.check()
    assert allocator.stats()[0].free == 16, "the parent's blocks are copied from yet"
    allocator.close(1)
    allocator.check()
    assert allocator.stats()[0].free == 20 and allocator.take_copies() == ((),)


def test_it_learns_from_what_ends() -> None:
    groups, known = (CacheGroup("full", "full", 4),), Known(0)
    allocator = ContiguousAllocator(groups, (21,), known)
    start(allocator, 0, 8)
    for _ in range(5):
        allocator.allocate(0, 1)
    allocator.free(0)  # preempted
    allocator.close(0)
    start(allocator, 1, 8)
    allocator.close(1)  # aborted amid its prompt: nothing is learnt
    assert known.seen == [(8, 5)]


@given(st.integers(2, 30), st.randoms(use_true_random=False))
def test_extents(blocks: int, rng: random.Random) -> None:
    pool = ExtentPool(blocks)
    held: dict[int, int] = {}
    for _ in range(40):
        if held and rng.random() < 0.45:
            first = rng.choice(sorted(held))
            length = held.pop(first)
            keep = rng.randrange(length)
            if keep:
                held[first] = keep
            pool.give(first + keep, length - keep)
        elif (wanted := rng.randint(1, 6)) and rng.random() < 0.3 and held:
            first = rng.choice(sorted(held))
            room = pool.room_after(first + held[first])
            more = pool.grow(first + held[first], 1, wanted)
            assert more == min(room, wanted)
            held[first] += more
        elif (taken := pool.take(1, wanted)) is not None:
            held[taken[0]] = taken[1]
            assert taken[1] == wanted or pool.largest <= taken[1] < wanted
        pool.check([b for first, length in held.items() for b in range(first, first + length)])


# -- predictions -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(0, 5000), st.lists(st.integers(1, 5000), max_size=60))
def test_a_prediction_is_always_more_than_there_is(prompt: int, output: int, seen: list[int]) -> None:
    predictor = LengthHistogram()
    for length in seen:
        predictor.observe(prompt, length)
    assert output < predictor.predict(prompt, output) <= max(2 * output + 64, 1.25 * max(seen, default=1) + 1)


def test_it_predicts_a_quantile_for_prompts_of_about_this_length() -> None:
    predictor = LengthHistogram(quantile=0.8)
    rng = random.Random(5)
    for _ in range(400):
        predictor.observe(rng.randint(64, 127), rng.randint(1, 100))
        predictor.observe(rng.randint(2048, 4095), rng.randint(900, 1000))
    assert 75 <= predictor.predict(100, 0) <= 100
    assert 900 <= predictor.predict(3000, 0) <= 1023
    assert 900 <= predictor.predict(3000, 500) <= 1023
    assert predictor.predict(9, 0) == 64, "nothing is known of such prompts"


def test_it_follows_what_changes() -> None:
    predictor = LengthHistogram()
    for _ in range(200):
        predictor.observe(50, 1000)
    for _ in range(200):
        predictor.observe(50, 20)
    assert predictor.predict(50, 0) <= 23


# -- the host tier -----------------------------------------------------------------------------------------------------


def test_the_host_pool_counts_bytes() -> None:
    pool = HostPool(100, (10, 3))
    assert pool.take(1, (5, 2)) and not pool.take(2, (4, 2)) and pool.take(2, (4, 1))
    assert (pool.stats().used, pool.stats().sequences) == (99, 2)
    with pytest.raises(KVCacheError, match="swapped out already"):
        pool.take(1, (0, 0))
    pool.give(1)
    pool.give(1)
    assert pool.stats().used == 43
    pool.check()
    with pytest.raises(KVCacheError, match="impossible"):
        HostPool(100, (0,))
