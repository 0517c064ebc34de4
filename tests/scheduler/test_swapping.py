"""What preemption by swapping saves, and what it leaves to be computed again."""

from __future__ import annotations

from scheduler_cases import complete, new, parts, run, schedule

from engine.kv import CacheGroup, ContiguousAllocator, HostPool, KVAllocator, PagedAllocator
from engine.scheduler import ScheduledStep, Scheduler, SchedulerConfig

FULL, WINDOW = CacheGroup("full", "full", 4), CacheGroup("swa", "window", 2, window=4)


def swapping(allocator: KVAllocator, budget: int = 64) -> Scheduler:
    return Scheduler(SchedulerConfig(budget, 4, 64), allocator, HostPool(1000, (1,) * len(allocator.groups)))


def alone(scheduler: Scheduler, request: str) -> ScheduledStep:
    step = scheduler.schedule(request)
    assert step is not None
    complete(scheduler, step)
    return step


def test_only_blocks_that_later_queries_see_are_saved_and_filled() -> None:
    scheduler = swapping(PagedAllocator((FULL, WINDOW), (20, 20)))
    scheduler.add(new(0, 11))
    run(scheduler)
    step = schedule(scheduler)
    complete(scheduler, step)
    full, window = step.sequences[0].tables
    scheduler.add(new(1, 2))
    (saved,) = alone(scheduler, "r1").swap_outs
    # The query at position 12 sees 9 to 12, which begin in the fifth block of two.
    assert saved.blocks == (full, window[4:]) and len(full) == 3 and len(window) == 6
    step = schedule(scheduler)
    (filled,) = step.swap_ins
    assert [len(table) for table in filled.blocks] == [3, 2] and 0 not in filled.blocks[1]
    assert parts(step) == [(1, 2, 1, True), (0, 12, 1, True)]


def test_a_prompt_computed_up_to_its_fork_is_computed_again() -> None:
    """What is saved leaves nothing to compute, and a sequence runs only to compute something."""
    scheduler = swapping(PagedAllocator((FULL,), (20,)), budget=8)
    scheduler.add(new(0, 9, max_tokens=2), n=2)
    run(scheduler)
    scheduler.add(new(2, 3, max_tokens=2))
    assert [swap.seq_id for swap in alone(scheduler, "r2").swap_outs] == [0]
    run(scheduler, 3)
    assert not scheduler.sequences


class NothingAhead:
    """Predicts no output, so that no room is reserved."""

    def predict(self, prompt: int, output: int) -> int:
        return output

    def observe(self, prompt: int, output: int) -> None:
        return


def test_a_sequence_forked_in_the_same_step_is_not_saved() -> None:
    """Its blocks are copies that this step makes, after what is saved has been read."""
    scheduler = swapping(ContiguousAllocator((FULL,), (7,), NothingAhead()))
    scheduler.add(new(0, 12))
    scheduler.add(new(1, 4, max_tokens=4), n=2)
    run(scheduler)
    step = schedule(scheduler)  # sequence 0 needs a fourth block behind its three, where the samples are
    assert step.history_copies and parts(step) == [(0, 12, 1, True)]
    assert [swap.seq_id for swap in step.swap_outs] == [1]
