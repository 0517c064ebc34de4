"""The virtual allocator: which addresses sequences get, and which of them have memory."""

from __future__ import annotations

import pytest

from engine.errors import AdmissionError, KVCacheError
from engine.kv import CacheGroup, MappingAllocator, PagedAllocator, PoolStats, PrefixHit, Remap, VirtualAllocator
from engine.kv.extents import ExtentPool
from engine.kv.virtual import MappedExtents


def virtual(pages: int = 6, page: int = 2, space: int = 30, block_size: int = 4) -> VirtualAllocator:
    """Memory for so many ``pages`` beside that of the null block, and addresses for ``space`` in all."""
    groups = (CacheGroup("full", "full", block_size),)
    return VirtualAllocator(groups, ((pages + 1) * page,), (page,), (space * page,))


def start(allocator: VirtualAllocator, seq_id: int, prompt: int, limit: int = 48) -> tuple[int, ...]:
    allocator.open(seq_id, limit, prompt=prompt)
    assert allocator.allocate(seq_id, prompt)
    allocator.take_copies()
    return allocator.tables(seq_id)[0]


def remap(allocator: VirtualAllocator) -> Remap:
    allocator.check()
    return next(iter(allocator.take_remaps()), Remap((), ()))


def test_what_it_takes() -> None:
    groups = (CacheGroup("full", "full", 4),)
    for blocks, page, space in ((5, 2, 10), (4, 2, 9), (4, 2, 2), (2, 2, 10)):
        with pytest.raises(KVCacheError, match="whole pages"):
            VirtualAllocator(groups, (blocks,), (page,), (space,))
    with pytest.raises(KVCacheError, match="for each cache group"):
        VirtualAllocator(groups, (4,), (2, 2), (8,))
    with pytest.raises(KVCacheError, match="takes full and latent groups"):
        VirtualAllocator((CacheGroup("swa", "window", 4, 8),), (4,), (2,), (8,))
    allocator = virtual(pages=3)
    with pytest.raises(AdmissionError, match=r"need 8 blocks of 4 .* has 6 \(24 tokens\)"):
        allocator.open(0, 25)
    allocator.open(0, 24)
    assert isinstance(allocator, MappingAllocator) and not isinstance(PagedAllocator(groups, (4,)), MappingAllocator)


def test_addresses_are_taken_for_the_limit_and_memory_for_the_tokens() -> None:
    allocator = virtual()
    assert start(allocator, 0, 9, limit=48) == (2, 3, 4)  # of a page of two blocks, and half of another
    assert remap(allocator) == Remap((), ((2, 4),))
    assert start(allocator, 1, 4, limit=8) == (14,)
    assert remap(allocator) == Remap((), ((14, 2),))
    assert allocator.stats() == (PoolStats(12, 6, 6, 0),)
    for _ in range(7):
        assert allocator.allocate(0, 1)
    assert not allocator.take_remaps(), "there is room in the page"
    assert allocator.allocate(0, 1) and remap(allocator) == Remap((), ((6, 2),))
    assert allocator.stats() == (PoolStats(12, 4, 8, 0),), "a block is left of a page of each"


def test_sequences_grow_in_place_until_memory_is_short() -> None:
    allocator = virtual(pages=4)
    first, second = start(allocator, 0, 8, limit=24), start(allocator, 1, 8, limit=24)
    for seq_id, table in ((0, first), (1, second)):
        assert allocator.allocate(seq_id, 8)
        assert allocator.tables(seq_id)[0] == tuple(range(table[0], table[0] + 4))
    assert not allocator.can_fit(0, 1) and not allocator.allocate(0, 1)
    allocator.free(1)
    assert allocator.can_fit(0, 8) and not allocator.can_fit(0, 9), "it has a limit"
    assert allocator.allocate(0, 8)
    assert allocator.tables(0)[0] == tuple(range(2, 8)) and allocator.take_copies() == ((),)


def test_memory_stays_until_another_needs_it_and_is_taken_again_first() -> None:
    allocator = virtual(pages=4)
    start(allocator, 0, 8, limit=8)
    start(allocator, 1, 16, limit=16)
    assert remap(allocator) == Remap((), ((2, 6),))
    allocator.close(1)
    assert not allocator.take_remaps() and allocator.stats()[0].used == 2
    assert start(allocator, 2, 8, limit=24) == (4, 5), "what was left last is begun with"
    assert remap(allocator) == Remap((), ())
    assert start(allocator, 3, 8, limit=8) == (10, 11)  # one page is still idle, but no sequence can begin there
    assert remap(allocator) == Remap((), ((10, 2),))
    assert start(allocator, 4, 8, limit=8) == (12, 13)
    assert remap(allocator) == Remap(((6, 2),), ((12, 2),)), "the idle page is needed elsewhere"


def test_mapped_addresses_come_before_those_that_fit_best() -> None:
    allocator = virtual(pages=4)
    tables = [start(allocator, seq_id, 8, limit=limit) for seq_id, limit in enumerate((24, 16, 16, 8))]
    assert tables == [(2, 3), (8, 9), (12, 13), (16, 17)]
    allocator.close(2)
    assert allocator.allocate(1, 8) and remap(allocator).mapped == ((2, 2), (8, 4), (16, 2)), "it gets what 2 has left"
    allocator.close(0)
    assert start(allocator, 4, 8, limit=16) == (2, 3) and remap(allocator) == Remap((), ())


def test_what_is_undone_in_the_same_step_is_not_done() -> None:
    group = MappedExtents(CacheGroup("full", "full", 4), ExtentPool(10), page=2, budget=1)
    group.resize(1, 0, 1)
    assert group.take_remap() == Remap((), ((2, 2),))
    for before, after in (
        (1, 5),
        (5, 1),
    ):  # the page in one place is given up for one in another, and this for the first
        group.resize(before, 1, 0)
        group.resize(after, 0, 1)
    assert group.take_remap() == Remap((), ()) and group.held == 1 and not group.idle


def test_who_finds_no_addresses_waits() -> None:
    allocator = virtual(pages=6, space=13)
    start(allocator, 0, 4, limit=48)
    start(allocator, 1, 4, limit=40)
    allocator.open(2, 16)
    assert not allocator.can_fit(2, 4) and not allocator.allocate(2, 4) and allocator.stats()[0].free == 8
    allocator.open(3, 8)
    assert allocator.can_fit(3, 8)
    allocator.close(1)
    assert allocator.can_fit(2, 4)


def test_a_fork_is_a_copy_in_addresses_of_its_own() -> None:
    allocator = virtual()
    start(allocator, 0, 10)
    remap(allocator)
    allocator.open(1, 48, prompt=10)
    assert allocator.can_fork(0, 1) and allocator.can_fork(0, 2) and not allocator.can_fork(0, 3)
    allocator.fork(0, 1)
    assert allocator.tables(1)[0] == (14, 15, 16)
    assert allocator.take_copies() == (((2, 14), (3, 15), (4, 16)),)
    assert remap(allocator) == Remap((), ((14, 4),))
    few = virtual(space=13)
    start(few, 0, 10)
    few.open(1, 48)
    assert few.can_fork(0, 1) and not few.can_fork(0, 2), "there are no addresses for two"


def test_what_is_copied_from_keeps_its_memory() -> None:
    allocator = virtual(pages=4)
    start(allocator, 0, 8, limit=8)
    remap(allocator)
    allocator.open(1, 8, prompt=8)
    allocator.fork(0, 1)
    allocator.close(0)  # its page is read by the copies of this step
    assert allocator.stats()[0].free == 4
    allocator.open(2, 24)
    assert not allocator.can_fit(2, 24) and allocator.can_fit(2, 16)
    assert allocator.allocate(2, 16)
    assert not remap(allocator).unmapped
    assert allocator.take_copies() == (((2, 4), (3, 5)),)
    assert allocator.allocate(2, 8) and remap(allocator).unmapped == ((2, 2),)


def test_another_idle_page_loses_its_memory_before_one_that_is_copied_from() -> None:
    allocator = virtual(pages=4)
    start(allocator, 0, 8, limit=8)
    start(allocator, 1, 8, limit=8)
    allocator.open(2, 8, prompt=8)
    allocator.fork(0, 2)
    remap(allocator)
    allocator.close(0)
    allocator.close(1)  # idle after the one that is copied from
    start_of = allocator.tables(2)[0][0]
    allocator.open(3, 24)
    assert allocator.can_fit(3, 16) and not allocator.can_fit(3, 17)
    assert allocator.allocate(3, 16) and remap(allocator).unmapped == ((4, 2),)
    assert allocator.take_copies() == (((2, start_of), (3, start_of + 1)),)


def test_room_is_counted_while_another_thread_pins() -> None:
    """Whoever asks for an engine's health does so beside its loop."""
    pool = ExtentPool(10)

    class Pinning(dict[int, None]):
        def __contains__(self, page: object) -> bool:
            pool.pin(4)
            return super().__contains__(page)

    pool.pin(3)
    group = MappedExtents(CacheGroup("full", "full", 4), pool, 2, budget=5, idle=Pinning({3: None}))
    assert group.room == 4


def test_what_is_rewound_is_given_to_others() -> None:
    allocator = virtual(pages=3)
    start(allocator, 0, 8, limit=24)
    assert allocator.allocate(0, 9) and remap(allocator).mapped == ((2, 6),)
    allocator.rewind(0, 9)
    assert allocator.stats()[0].free == 2
    start(allocator, 1, 4, limit=4)
    assert remap(allocator) == Remap(((6, 2),), ((8, 2),))


def test_after_a_loss_nothing_is_mapped() -> None:
    allocator = virtual()
    start(allocator, 0, 20)
    start(allocator, 1, 4)
    remap(allocator)
    allocator.free(0)
    allocator.forget()
    assert remap(allocator) == Remap((), ((14, 2),)), "what is still held"
    assert start(allocator, 2, 4) == (2,) and remap(allocator) == Remap((), ((2, 2),))


def test_what_comes_back_from_the_host_gets_memory() -> None:
    allocator = virtual()
    start(allocator, 0, 12)
    allocator.free(0)
    assert allocator.allocate(0, 1, PrefixHit(12, ((),)))
    assert allocator.tables(0)[0] == (2, 3, 4, 5)
    with pytest.raises(KVCacheError, match="attach it to an empty one"):
        allocator.allocate(0, 1, PrefixHit(12, ((),)))


def test_extents_in_the_midst() -> None:
    pool = ExtentPool(12)
    assert pool.take_at(4, 3) and (pool.free, pool.largest) == (8, 5)
    assert not pool.take_at(3, 2) and not pool.take_at(4, 1) and not pool.take_at(10, 3) and not pool.take_at(0, 1)
    assert pool.take_at(1, 3) and pool.take_at(9, 3) and pool.take_at(7, 2) and pool.free == 0
    assert not pool.take_at(1, 1)
    pool.give(4, 3)
    pool.check([1, 2, 3, 7, 8, 9, 10, 11])
    assert [pool.room_for(length) for length in (1, 2, 3, 4)] == [3, 1, 1, 0]
