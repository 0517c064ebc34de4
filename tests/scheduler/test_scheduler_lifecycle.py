"""How sequences are preempted, ended and forked."""

from __future__ import annotations

import pytest
from scheduler_cases import build, complete, new, parts, run, schedule, used

from engine.errors import SchedulerError
from engine.kv import CacheGroup, PagedAllocator
from engine.scheduler import Scheduler, SchedulerConfig, Sequence, SequenceStatus

# Preemption.


def test_the_last_arrived_is_preempted_and_comes_back_first() -> None:
    scheduler = build(blocks=4, block_size=4, slots=3)
    for i in range(3):
        scheduler.add(new(i, 4, max_tokens=5))
    run(scheduler)  # 0, 1 and 2, a block each; then all three want a second one
    step = schedule(scheduler)
    assert [part.seq_id for part in step.sequences] == [0, 1]
    assert scheduler.sequences[2].status is SequenceStatus.WAITING and scheduler.sequences[2].preemptions == 1
    complete(scheduler, step)
    run(scheduler, 3)
    assert list(scheduler.sequences) == [2]
    # Of its 5 tokens the first 4 were evicted when 1 took their block: all are computed again.
    step = schedule(scheduler)
    assert parts(step) == [(2, 0, 5, True)] and step.sequences[0].token_ids == (3000, 3001, 3002, 3003, 7)
    assert scheduler.stats().preemptions == 1


def test_the_lowest_priority_is_preempted() -> None:
    scheduler = build(blocks=3, block_size=4, policy="priority")
    for i, priority in enumerate((9, 0, 0)):
        scheduler.add(new(i, 4, max_tokens=6, priority=priority))
    run(scheduler)
    assert [part.seq_id for part in schedule(scheduler).sequences] == [1]
    assert scheduler.sequences[0].status is SequenceStatus.WAITING
    assert (
        scheduler.sequences[2].status is SequenceStatus.RUNNING
    )  # no block for it, and nobody after it to take one from


def test_a_preempted_sequence_waits_for_its_tokens_in_flight() -> None:
    scheduler = build(blocks=3, block_size=4, slots=2)
    scheduler.add(new(0, 4, max_tokens=2))
    scheduler.add(new(1, 7, max_tokens=4))
    first = schedule(scheduler)
    second = schedule(scheduler)  # 0 takes its second block from 1, whose token is in flight
    assert parts(second) == [(0, 4, 1, True)]
    complete(scheduler, first, token=5)
    assert scheduler.sequences[1].output_ids == [5]
    assert scheduler.schedule() is None  # 0 is done but for its token in flight, and 1 has no room yet
    complete(scheduler, second)
    (part,) = schedule(scheduler).sequences
    # No hit: it lost its blocks before the step that wrote them was done.
    assert part.token_ids == (*range(2000, 2007), 5) and part.start == 0 and part.emits


def test_a_preempted_sequence_is_not_restarted_before_its_token_arrives() -> None:
    scheduler = build(blocks=5, block_size=4, slots=2)
    scheduler.add(new(0, 8, max_tokens=2))
    scheduler.add(new(1, 9, max_tokens=4))
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert scheduler.sequences[1].status is SequenceStatus.WAITING
    scheduler.abort("r0")
    assert scheduler.schedule() is None  # there is room now, but a token of 1 is in flight
    complete(scheduler, first, token=5)
    assert schedule(scheduler).sequences[0].token_ids[-1] == 5
    complete(scheduler, second)


def test_one_with_nothing_left_to_compute_is_preempted_first() -> None:
    scheduler = build(blocks=3, block_size=4)
    scheduler.add(new(0, 3, max_tokens=1))
    scheduler.add(new(1, 4, max_tokens=4))
    scheduler.add(new(2, 3, max_tokens=4))
    first = schedule(scheduler)
    second = schedule(scheduler)  # 1 takes the block of 0, whose last token is in flight, and not that of 2
    assert parts(second) == [(1, 4, 1, True), (2, 3, 1, True)]
    updates = scheduler.complete(first, {0: 5, 1: 5, 2: 5})
    assert [update.finished for update in updates] == [True, False, False] and updates[0].sequence.output_ids == [5]


def test_nothing_is_admitted_while_blocks_are_short() -> None:
    scheduler = build(blocks=10, block_size=2, budget=5)
    scheduler.add(new(0, 2, max_tokens=14))
    scheduler.add(new(1, 18, max_tokens=2))
    scheduler.add(new(2, 1, max_tokens=1))
    run(scheduler, 3)
    # One block is free where 1 wants two; 0, which comes before it, is not preempted, nor does 2 take that block.
    assert parts(schedule(scheduler)) == [(0, 4, 1, True)]
    assert scheduler.stats().pools[0].used == 9
    assert scheduler.sequences[1].status is SequenceStatus.RUNNING and scheduler.sequences[1].num_computed == 11


# Ends.


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_abort_frees_everything_at_once(steps: int, pipelined: bool, n: int) -> None:
    """Waiting, amid its prompt, before the fork, decoding; with a step in flight or none."""
    scheduler = build(budget=6, slots=3)
    sequences = scheduler.add(new(0, 12), n)
    flying = None
    for _ in range(steps):
        if flying:
            complete(scheduler, flying)
        flying = schedule(scheduler)
        if not pipelined:
            complete(scheduler, flying)
            flying = None
    assert scheduler.abort("r0") == tuple(range(n))
    scheduler.check()
    stats = scheduler.stats()
    assert (stats.waiting, stats.running, used(scheduler)) == (0, 0, 0)
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)
    assert scheduler.abort("r0") == ()
    if flying:
        assert scheduler.complete(flying, {}) == []


def test_abort_of_a_preempted_sequence() -> None:
    scheduler = build(blocks=3, block_size=4)
    for i in range(2):
        scheduler.add(new(i, 4, max_tokens=8))
    run(scheduler, 5)
    schedule(scheduler)
    assert scheduler.sequences[1].preemptions == 1
    assert scheduler.abort("r1") == (1,) and scheduler.stats().waiting == 0
    scheduler.check()


def test_reset_computes_everything_again() -> None:
    scheduler = build()
    scheduler.add(new(0, 6))
    run(scheduler, 2)
    lost = schedule(scheduler)
    scheduler.reset()
    scheduler.check()
    assert scheduler.stats().steps_in_flight == 0 and used(scheduler) == 0
    with pytest.raises(SchedulerError):
        scheduler.complete(lost, {0: 5})
    step = schedule(scheduler)
    assert parts(step) == [(0, 0, 8, True)] and step.sequences[0].token_ids[-2:] == (7, 7) and step.history_fills == ()


def test_reset_scores_a_prompt_from_its_beginning() -> None:
    groups = (CacheGroup("full", "full", 4),)
    scheduler = Scheduler(SchedulerConfig(4, 2, 64, max_rows=8), PagedAllocator(groups, (20,)))
    scheduler.add(Sequence(0, "r0", list(range(12)), 4, scores_prompt=True))
    assert [schedule(scheduler).sequences[0].scored for _ in range(2)] == [(0, 4), (4, 8)]
    scheduler.reset()
    assert [schedule(scheduler).sequences[0].scored for _ in range(3)] == [(0, 4), (4, 8), (8, 11)]


def test_one_request_runs_alone_and_the_others_come_back() -> None:
    scheduler = build(blocks=6, block_size=4, slots=2)
    for i in range(3):
        scheduler.add(new(i, 8, max_tokens=4))
    run(scheduler)
    step = scheduler.schedule("r2")  # no slot and no room for it, were the others to stay
    assert step is not None and parts(step) == [(2, 0, 8, True)]
    complete(scheduler, step)
    assert scheduler.schedule("r9") is None  # it has ended, say
    assert [part.seq_id for part in schedule(scheduler).sequences] == [0, 1]


# Parallel samples.


def test_samples_share_the_prompt_and_run_its_last_token_each() -> None:
    scheduler = build(block_size=4)
    sequences = scheduler.add(new(0, 7), n=3)
    assert [(s.seq_id, s.branch) for s in sequences] == [(0, 0), (1, 1), (2, 2)]
    step = schedule(scheduler)
    assert parts(step) == [(0, 0, 6, False)]
    slot, (table,) = step.sequences[0].slot, step.sequences[0].tables
    step = schedule(scheduler)  # the fork needs no result of the step before
    assert parts(step) == [(i, 6, 1, True) for i in range(3)]
    assert step.history_copies == tuple((slot, part.slot) for part in step.sequences[1:])
    tables = [part.tables[0] for part in step.sequences]
    assert {t[0] for t in tables} == {table[0]} and len({t[1] for t in tables}) == 3
    sources = {source for source, _ in step.block_copies[0]}
    assert sources == {table[1]} and len(step.block_copies[0]) == 2 and table[1] in {t[1] for t in tables}
    assert all(part.token_ids == (1006,) for part in step.sequences)
    assert schedule(scheduler).block_copies == ((),)


def test_samples_have_what_the_prompt_hit_whatever_they_hit_later() -> None:
    scheduler = build(block_size=4)
    branches = scheduler.add(new(0, 9), n=2)
    run(scheduler, 2)
    scheduler.add(new(2, 3))
    alone = scheduler.schedule("r2")
    assert alone is not None
    complete(scheduler, alone)
    assert parts(schedule(scheduler)) == [(2, 3, 1, True), (0, 8, 2, True), (1, 8, 2, True)]
    assert [branch.num_cached for branch in branches] == [0, 0]


def test_samples_forked_on_a_block_boundary_copy_no_block() -> None:
    scheduler = build(block_size=4)
    scheduler.add(new(0, 9), n=2)
    schedule(scheduler)
    step = schedule(scheduler)
    assert step.block_copies == ((),) and len(step.history_copies) == 1


def test_samples_without_a_slot_wait_and_hit_the_prefix() -> None:
    scheduler = build(block_size=4, slots=2)
    sequences = scheduler.add(new(0, 10, max_tokens=2), n=4)
    run(scheduler)
    step = schedule(scheduler)
    assert [part.seq_id for part in step.sequences] == [0, 1]
    assert [s.status for s in sequences[2:]] == [SequenceStatus.WAITING] * 2
    complete(scheduler, step)
    run(scheduler)
    step = schedule(scheduler)
    assert parts(step) == [(2, 8, 2, True), (3, 8, 2, True)] and step.history_copies == ()


def test_samples_without_blocks_wait() -> None:
    scheduler = build(blocks=4, block_size=4)
    sequences = scheduler.add(new(0, 8, max_tokens=4), n=4)
    schedule(scheduler)  # in flight, so that nobody can hit its prefix
    assert [part.seq_id for part in schedule(scheduler).sequences] == [0, 1]
    assert [s.status for s in sequences[2:]] == [SequenceStatus.WAITING] * 2


def test_samples_of_a_one_token_prompt_just_run() -> None:
    scheduler = build()
    scheduler.add(new(0, 1), n=3)
    step = schedule(scheduler)
    assert parts(step) == [(i, 0, 1, True) for i in range(3)] and step.history_copies == ()


def test_samples_of_a_cached_prompt_leave_one_token_before_the_fork() -> None:
    prompt = list(range(9))
    scheduler = build(block_size=4)
    scheduler.add(new(9, prompt, max_tokens=1))
    run(scheduler)
    scheduler.add(new(0, prompt), n=2)
    assert parts(schedule(scheduler)) == [(0, 4, 4, False)]
    assert parts(schedule(scheduler)) == [(0, 8, 1, True), (1, 8, 1, True)]


def test_samples_outlive_the_one_that_was_to_be_forked() -> None:
    scheduler = build(budget=4)
    scheduler.add(new(0, 9), n=3)
    scheduler.complete(schedule(scheduler), {}, failed={0: "broken"})
    scheduler.check()
    assert sorted(scheduler.sequences) == [1, 2] and scheduler.stats().waiting == 2
    assert parts(schedule(scheduler)) == [(1, 0, 4, False)]


def test_a_sample_can_end_before_the_fork() -> None:
    scheduler = build(budget=4)
    scheduler.add(new(0, 9), n=3)
    run(scheduler)
    scheduler.finish(1)
    scheduler.check()
    run(scheduler)
    assert parts(schedule(scheduler)) == [(0, 8, 1, True), (2, 8, 1, True)]
