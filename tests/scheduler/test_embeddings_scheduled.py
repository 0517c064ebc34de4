"""Embeddings beside generation: each wanted position's state is given once, in order, whatever is preempted or lost."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from scheduler_cases import build, complete, new, parts, run, schedule, used

from engine.errors import AdmissionError
from engine.scheduler import ScheduledStep, Sequence


def embedding(seq_id: int, prompt: int | list[int], embeds_from: int = 0) -> Sequence:
    sequence = new(seq_id, prompt, max_tokens=0)
    sequence.embeds_from = embeds_from
    return sequence


def whole(sequence: Sequence) -> Sequence:
    sequence.whole = True
    return sequence


def test_chunks_of_a_mean_and_the_end() -> None:
    scheduler = build(budget=10)
    scheduler.add(embedding(0, 25))
    given = []
    for _ in range(3):
        step = schedule(scheduler)
        given.append(step.sequences[0].embedded)
        assert not step.sequences[0].emits
        updates = scheduler.complete(step, {})
    assert given == [(0, 10), (10, 20), (20, 25)]
    assert [(u.token_id, u.finished, u.error) for u in updates] == [(None, True, None)]
    assert used(scheduler) == 0 and scheduler.schedule() is None


def test_the_last_alone_is_wanted_and_takes_no_row_of_the_head() -> None:
    scheduler = build(budget=64, slots=2)
    scheduler.add(embedding(0, 9, 8))
    scheduler.add(new(1, 5))
    step = schedule(scheduler)
    assert parts(step) == [(0, 0, 9, False), (1, 0, 5, True)]
    assert [part.embedded for part in step.sequences] == [(8, 9), (0, 0)]


@pytest.mark.parametrize(("embeds_from", "hit"), [(0, 0), (16, 16), (5, 4)])
def test_no_hit_over_a_wanted_position(embeds_from: int, hit: int) -> None:
    scheduler = build()
    scheduler.add(embedding(0, list(range(17)), 16))
    run(scheduler)
    scheduler.add(embedding(1, list(range(17)), embeds_from))
    part = schedule(scheduler).sequences[0]
    assert (part.start, part.embedded) == (hit, (embeds_from, 17))


def test_an_encoder_s_text_is_computed_whole() -> None:
    """Behind others where a step has no room for all of it, and of nothing that is cached."""
    scheduler = build(budget=40, context=40)
    for seq_id, length in enumerate((33, 8, 7, 1, 40)):
        scheduler.add(whole(embedding(seq_id, list(range(length)), length - 1)))
    steps = []
    while (step := scheduler.schedule()) is not None:
        steps.append(sorted(parts(step)))
        complete(scheduler, step)
    assert steps == [[(0, 0, 33, False)], [(1, 0, 8, False), (2, 0, 7, False), (3, 0, 1, False)], [(4, 0, 40, False)]]
    scheduler.add(embedding(5, list(range(40)), 39))
    assert schedule(scheduler).sequences[0].start == 0  # nor does anyone find what it has computed


def test_the_whole_context_can_be_embedded_and_no_more() -> None:
    scheduler = build(context=30)
    scheduler.add(embedding(0, 30))
    complete(scheduler, schedule(scheduler))
    with pytest.raises(AdmissionError, match="31 tokens"):
        scheduler.add(embedding(1, 31))


@pytest.mark.parametrize("encoders", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_each_position_once(depth: int, encoders: bool) -> None:
    """In little memory, so that they are preempted, with faults that lose all steps in flight, and steps that overlap."""
    rng = np.random.default_rng()
    preempted = 0
    for _ in range(40):
        scheduler = build(
            blocks=14, budget=int(rng.integers(*((45, 60) if encoders else (3, 40)))), slots=4, context=50
        )
        wanted = {}
        for seq_id in range(12):
            length = int(rng.integers(1, 40))
            if rng.random() < 0.6:
                wanted[seq_id] = (int(rng.integers(0, length)), length)
                sequence = embedding(seq_id, length, wanted[seq_id][0])
                scheduler.add(whole(sequence) if encoders else sequence)
            else:
                scheduler.add(new(seq_id, length, max_tokens=int(rng.integers(1, 10))))
        got: dict[int, list[int]] = {seq_id: [] for seq_id in wanted}
        ended: list[int] = []
        flights: deque[ScheduledStep] = deque()
        while scheduler.sequences:
            if rng.random() < 0.05:
                scheduler.reset()
                flights.clear()
            while len(flights) < depth and (step := scheduler.schedule()) is not None:
                scheduler.check()
                flights.append(step)
            step = flights.popleft()
            for part in step.sequences:
                start, stop = part.embedded
                assert start == stop == 0 or part.start <= start < stop == part.start + part.num_tokens
                if part.seq_id in wanted:
                    assert not encoders or (part.start, part.num_tokens) == (0, wanted[part.seq_id][1])
                    got[part.seq_id] += range(*part.embedded)
            tokens = {part.seq_id: 7 for part in step.sequences if part.emits}
            ended += [u.sequence.seq_id for u in scheduler.complete(step, tokens) if u.finished]
            scheduler.check()
        assert got == {seq_id: list(range(*span)) for seq_id, span in wanted.items()}
        assert sorted(ended) == list(range(12)) and used(scheduler) == 0
        preempted += scheduler.stats().preemptions
    assert preempted > 0
