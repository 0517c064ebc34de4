"""Each rule of the scheduler by itself: the order of a step, admission, pipelining, prefixes."""

from __future__ import annotations

import time

import pytest
from scheduler_cases import build, complete, new, parts, run, schedule, used

from engine.errors import AdmissionError, SchedulerError
from engine.kv import CacheGroup, PagedAllocator, PrefixHit
from engine.scheduler import FROM_HISTORY, Scheduler, SchedulerConfig, Sequence, SequenceStatus

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


def test_what_fills_the_context_exactly_is_admitted() -> None:
    scheduler = build(context=20)
    scheduler.add(new(0, 12, max_tokens=8))
    run(scheduler, 8)
    assert not scheduler.sequences


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


def test_a_synchronous_sequence_waits_for_its_token_and_no_other_does() -> None:
    scheduler = build()
    waiting, other = new(0, 3, max_tokens=3), new(1, 3, max_tokens=9)
    waiting.synchronous = True
    scheduler.add(waiting)
    scheduler.add(other)
    first, second = schedule(scheduler), schedule(scheduler)
    assert [part.seq_id for part in first.sequences] == [0, 1]
    assert [part.seq_id for part in second.sequences] == [1]
    complete(scheduler, first, token=5)
    third = schedule(scheduler)
    assert {part.seq_id: part.token_ids for part in third.sequences} == {0: (5,), 1: (FROM_HISTORY,)}
    assert [part.seq_id for part in schedule(scheduler).sequences] == [1]


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
