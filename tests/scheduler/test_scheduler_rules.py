"""Each rule of the scheduler by itself."""

from __future__ import annotations

import time

import pytest

from engine.errors import AdmissionError, SchedulerError
from engine.kv import CacheGroup, PagedAllocator, PrefixHit
from engine.scheduler import FROM_HISTORY, ScheduledStep, Scheduler, SchedulerConfig, Sequence, SequenceStatus


def build(
    blocks: int = 100,
    block_size: int = 4,
    budget: int = 64,
    slots: int = 8,
    context: int = 200,
    policy: str = "fcfs",
    chunk: int | None = None,
) -> Scheduler:
    allocator = PagedAllocator((CacheGroup("full", "full", block_size),), (blocks + 1,))
    return Scheduler(SchedulerConfig(budget, slots, context, policy, chunk), allocator)


def new(seq_id: int, prompt: int | list[int], max_tokens: int = 8, priority: int = 0) -> Sequence:
    """A request named after its sequence; a prompt given by its length shares no prefix with another's."""
    tokens = prompt if isinstance(prompt, list) else [1000 * (seq_id + 1) + i for i in range(prompt)]
    return Sequence(seq_id, f"r{seq_id}", tokens, max_tokens, priority)


def schedule(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    scheduler.check()
    return step


def complete(scheduler: Scheduler, step: ScheduledStep, token: int = 7) -> None:
    scheduler.complete(step, {part.seq_id: token for part in step.sequences if part.emits})
    scheduler.check()


def run(scheduler: Scheduler, steps: int = 1) -> None:
    for _ in range(steps):
        complete(scheduler, schedule(scheduler))


def parts(step: ScheduledStep) -> list[tuple[int, int, int, bool]]:
    return [(part.seq_id, part.start, part.count, part.emits) for part in step.sequences]


def used(scheduler: Scheduler) -> int:
    return scheduler.stats().pools[0].used


# The order of a step.


def test_decodes_then_running_prefills_then_new_requests() -> None:
    scheduler = build(budget=10)
    scheduler.add(new(0, 3))
    run(scheduler)
    scheduler.add(new(1, 14))
    assert parts(schedule(scheduler)) == [(0, 3, 1, True), (1, 0, 9, False)]
    scheduler.add(new(2, 6))
    step = schedule(scheduler)
    assert parts(step) == [(0, 4, 1, True), (1, 9, 5, True), (2, 0, 4, False)]
    assert step.decode_count == 1 and step.num_tokens == 10


def test_sequences_with_one_token_come_first_whatever_they_are() -> None:
    scheduler = build(budget=6)
    scheduler.add(new(0, 5))
    scheduler.add(new(1, 9))
    assert parts(schedule(scheduler)) == [(1, 0, 1, False), (0, 0, 5, True)]
    step = schedule(scheduler)
    assert parts(step) == [(0, 5, 1, True), (1, 1, 5, False)] and step.decode_count == 1


def test_a_long_prompt_is_held_to_its_chunk() -> None:
    scheduler = build(budget=20, chunk=6)
    scheduler.add(new(0, 13))
    scheduler.add(new(1, 4))
    assert parts(schedule(scheduler)) == [(0, 0, 6, False), (1, 0, 4, True)]
    assert parts(schedule(scheduler)) == [(1, 4, 1, True), (0, 6, 6, False)]
    assert parts(schedule(scheduler)) == [(0, 12, 1, True), (1, 5, 1, True)]


def test_no_more_sequences_than_slots() -> None:
    scheduler = build(slots=2)
    for i in range(3):
        scheduler.add(new(i, 2, max_tokens=1 + i))
    step = schedule(scheduler)
    assert [part.seq_id for part in step.sequences] == [0, 1]
    complete(scheduler, step)  # ends 0
    step = schedule(scheduler)
    assert [part.seq_id for part in step.sequences] == [1, 2]
    assert sorted(part.slot for part in step.sequences) == [0, 1]


def test_priority_decides_who_is_admitted() -> None:
    for policy, order in (("fcfs", [0, 1, 2]), ("priority", [1, 2, 0])):
        scheduler = build(policy=policy)
        for i, priority in enumerate((5, -1, 0)):
            scheduler.add(new(i, 3, priority=priority))
        assert [part.seq_id for part in schedule(scheduler).sequences] == order


def test_a_step_carries_what_the_device_needs() -> None:
    scheduler = build(block_size=4, budget=6)
    scheduler.add(new(0, [11, 12, 13, 14, 15, 16, 17]))
    (part,) = schedule(scheduler).sequences
    assert part.token_ids == (11, 12, 13, 14, 15, 16) and len(part.tables[0]) == 2
    (part,) = schedule(scheduler).sequences
    assert part.token_ids == (17,) and part.emits and len(part.tables[0]) == 2
    assert 0 not in part.tables[0]


def test_every_group_has_its_table() -> None:
    groups = (CacheGroup("full", "full", 4), CacheGroup("swa", "window", 2, window=4))
    scheduler = Scheduler(SchedulerConfig(32, 4, 64), PagedAllocator(groups, (20, 20)))
    scheduler.add(new(0, 7))
    (part,) = schedule(scheduler).sequences
    assert [len(table) for table in part.tables] == [2, 4]


def test_an_unchanged_table_is_the_same_object() -> None:
    scheduler = build(block_size=4)
    scheduler.add(new(0, 5))
    tables = []
    for _ in range(4):
        step = schedule(scheduler)
        tables.append(step.sequences[0].tables)
        complete(scheduler, step)
    assert tables[0] is tables[1] is tables[2] is tables[3]
    assert schedule(scheduler).sequences[0].tables is not tables[0]


def test_nothing_to_do_is_none() -> None:
    scheduler = build()
    assert scheduler.schedule() is None
    scheduler.add(new(0, 3, max_tokens=1))
    step = schedule(scheduler)
    assert scheduler.schedule() is None  # its only token is in flight
    complete(scheduler, step)
    assert scheduler.schedule() is None and not scheduler.sequences


# Admission.


@pytest.mark.parametrize(
    ("sequence", "n", "words"),
    [
        (new(0, []), 1, "no tokens"),
        (new(0, 3, max_tokens=0), 1, "max_tokens is 0"),
        (new(0, 3), 0, "n is 0"),
        (new(0, [1, -1]), 1, "token id"),
        (new(0, [1, 2**31]), 1, "token id"),
        (
            new(0, 40, max_tokens=11),
            1,
            "prompt of 40 tokens and max_tokens 11 make 51 tokens, and the context holds 50",
        ),
        (new(0, 40, max_tokens=5), 1, r"45 tokens, which need 12 blocks of 4 .* has 11 \(44 tokens\)"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(sequence: Sequence, n: int, words: str) -> None:
    scheduler = build(blocks=11, context=50)
    with pytest.raises(AdmissionError, match=words):
        scheduler.add(sequence, n)
    assert not scheduler.sequences and scheduler.schedule() is None
    scheduler.check()
    scheduler.add(new(0, 40, max_tokens=4))  # just fits, and the id is free


def test_ids_in_use_are_refused() -> None:
    scheduler = build()
    scheduler.add(new(0, 3), n=3)
    with pytest.raises(SchedulerError, match="id 2 is in use"):
        scheduler.add(new(2, 3))
    with pytest.raises(SchedulerError, match="not in the scheduler"):
        scheduler.finish(9)
    scheduler.check()


def test_a_wrong_configuration_is_named() -> None:
    with pytest.raises(SchedulerError, match="max_batch_tokens is 0"):
        build(budget=0)
    with pytest.raises(SchedulerError, match="known are: fcfs, priority"):
        build(policy="fifo")


def test_a_request_waits_until_all_its_prompt_fits() -> None:
    scheduler = build(blocks=6, block_size=4, budget=8)
    scheduler.add(new(0, 8, max_tokens=4))
    scheduler.add(new(1, 17, max_tokens=4))
    scheduler.add(new(2, 1, max_tokens=1))
    run(scheduler, 3)
    # Sequence 1 would start its first chunk of 7 tokens, but its 17 do not fit beside 0; nor is it overtaken.
    assert [scheduler.sequences[i].status for i in (0, 1, 2)] == [
        SequenceStatus.RUNNING,
        SequenceStatus.WAITING,
        SequenceStatus.WAITING,
    ]
    run(scheduler)
    assert 0 not in scheduler.sequences
    assert parts(schedule(scheduler)) == [(1, 0, 8, False)]


# Pipelining.


def test_a_token_in_flight_is_taken_from_history() -> None:
    scheduler = build()
    scheduler.add(new(0, 3, max_tokens=3))
    first = schedule(scheduler)
    second, third = schedule(scheduler), schedule(scheduler)
    assert [step.sequences[0].token_ids for step in (second, third)] == [(FROM_HISTORY,), (FROM_HISTORY,)]
    assert [step.sequences[0].start for step in (first, second, third)] == [0, 3, 4]
    assert scheduler.schedule() is None  # max_tokens counts the tokens in flight
    for token, step in ((5, first), (6, second)):
        scheduler.complete(step, {0: token})
    assert scheduler.sequences[0].output_ids == [5, 6]
    (update,) = scheduler.complete(third, {0: 9})
    assert update.finished and update.sequence.output_ids == [5, 6, 9]
    assert not scheduler.sequences and used(scheduler) == 0


def test_a_known_token_is_given() -> None:
    scheduler = build()
    scheduler.add(new(0, 3))
    complete(scheduler, schedule(scheduler), token=42)
    assert schedule(scheduler).sequences[0].token_ids == (42,)


def test_tokens_past_the_end_are_dropped() -> None:
    scheduler = build()
    (sequence,) = scheduler.add(new(0, 3))
    first, second = schedule(scheduler), schedule(scheduler)
    complete(scheduler, first, token=5)
    scheduler.finish(0)  # 5 was a stop token
    assert used(scheduler) == 0
    scheduler.add(new(0, 3))  # the id is free, and what is in flight is not of this one
    assert scheduler.complete(second, {0: 6}) == []
    assert sequence.output_ids == [5] and scheduler.sequences[0].output_ids == []
    scheduler.check()


def test_steps_complete_in_order_and_with_all_tokens() -> None:
    scheduler = build()
    scheduler.add(new(0, 3))
    first, second = schedule(scheduler), schedule(scheduler)
    with pytest.raises(SchedulerError, match="not the oldest"):
        scheduler.complete(second, {0: 1})
    with pytest.raises(SchedulerError, match="no token for sequence 0"):
        scheduler.complete(first, {})
    scheduler.check()
    complete(scheduler, first)
    complete(scheduler, second)
    with pytest.raises(SchedulerError):
        scheduler.complete(second, {0: 1})


def test_a_failed_row_ends_its_sequence_only() -> None:
    scheduler = build()
    for i in range(2):
        scheduler.add(new(i, 3))
    step = schedule(scheduler)
    failed, good = scheduler.complete(step, {1: 5}, failed={0: "the logits are not finite"})
    assert failed.finished and failed.error == "the logits are not finite" and failed.sequence.seq_id == 0
    assert good.token_id == 5 and not good.finished
    assert list(scheduler.sequences) == [1]
    scheduler.check()


# Prefixes.


def test_a_prefix_is_hit_only_after_its_step_completed() -> None:
    prompt = list(range(10))
    scheduler = build(block_size=4)
    scheduler.add(new(0, prompt))
    first = schedule(scheduler)
    scheduler.add(new(1, prompt))
    step = schedule(scheduler)
    assert (1, 0, 10, True) in parts(step) and step.history_fills == ()
    complete(scheduler, first)
    scheduler.add(new(2, prompt))
    step = schedule(scheduler)
    assert (2, 8, 2, True) in parts(step)
    slot = next(part.slot for part in step.sequences if part.seq_id == 2)
    assert step.history_fills == ((slot, tuple(prompt[:8])),)
    assert [scheduler.sequences[i].num_cached for i in range(3)] == [0, 0, 8]


def test_output_is_hit_too_and_one_token_is_left() -> None:
    scheduler = build(block_size=4)
    (first,) = scheduler.add(new(0, list(range(6)), max_tokens=6))
    run(scheduler, 6)
    assert not scheduler.sequences
    # The last token of 12 was sampled but never computed, so the third block is not there.
    scheduler.add(new(1, [*first.token_ids, 99]))
    assert parts(schedule(scheduler)) == [(1, 8, 5, True)]
    scheduler.add(new(2, first.token_ids[:8]))
    assert parts(schedule(scheduler))[1] == (2, 4, 4, True)


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


# Health.


def test_a_stall_is_reported_and_not_waited_out() -> None:
    class Stuck(PagedAllocator):
        def can_fit(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
            return False

    scheduler = Scheduler(SchedulerConfig(8, 2, 32), Stuck((CacheGroup("full", "full", 4),), (9,)))
    scheduler.add(new(0, 3))
    with pytest.raises(SchedulerError, match="stalls with 1 sequences waiting"):
        scheduler.schedule()


def test_a_step_of_64_decodes_is_scheduled_in_a_millisecond() -> None:
    scheduler = build(blocks=64 * 80, block_size=16, budget=8192, slots=64, context=2048)
    for i in range(64):
        scheduler.add(new(i, 1000, max_tokens=200))
    while any(sequence.wanted != 1 for sequence in scheduler.sequences.values()):
        complete(scheduler, schedule(scheduler))
    best = float("inf")
    for _ in range(40):
        begun = time.perf_counter()
        step = scheduler.schedule()
        taken = time.perf_counter() - begun
        assert step is not None and step.decode_count == 64
        scheduler.complete(step, dict.fromkeys(range(64), 7))
        best = min(best, taken)
    assert best < 1e-3
