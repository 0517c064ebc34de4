"""The scheduler against a shadow device: integer KV memory, history rows, and a model that hashes all it reads.

Whatever the batching, chunks, preemptions of either kind, prefix hits, windows, forks, aborts, faults and pipelining, and
whichever the allocator, each sequence must get the tokens that a direct evaluation of the same model gives it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from shadow import Engine

from engine.errors import AdmissionError
from engine.scheduler import SchedulerConfig


@dataclass(frozen=True)
class Request:
    """A random request; most begin alike."""

    shared: int
    tail: list[int]
    max_tokens: int
    n: int
    priority: int
    salt: bytes
    kind: str


REQUESTS = st.lists(
    st.builds(
        Request,
        shared=st.integers(0, 20),
        tail=st.lists(st.integers(1, 4), min_size=1, max_size=6),
        max_tokens=st.integers(1, 15),
        n=st.sampled_from([1, 2, 3, 5]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([b"", b"", b"x"]),
        kind=st.sampled_from(["plain", "guesses", "synchronous", "beams", "scores"]),
    ),
    min_size=1,
    max_size=4,
)


KINDS = ["paged", "contiguous", "virtual"]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(8, 60),
        sizes=st.lists(st.integers(1, 7), min_size=1, max_size=2),
        budget=st.integers(1, 30),
        slots=st.integers(1, 8),
        policy=st.sampled_from(["fcfs", "priority"]),
        depth=st.integers(1, 3),
        more_rows=st.integers(0, 6),
        windows=st.lists(st.none() | st.integers(1, 12), min_size=2, max_size=2),
        kind=st.sampled_from(KINDS),
        host=st.none() | st.integers(0, 60),
        requests=REQUESTS,
    )
    def start(
        self,
        capacity: int,
        sizes: list[int],
        budget: int,
        slots: int,
        policy: str,
        depth: int,
        more_rows: int,
        windows: list[int | None],
        kind: str,
        host: int | None,
        requests: list[Request],
    ) -> None:
        groups = tuple((size, 1 + capacity // size) for size in sizes)
        config = SchedulerConfig(budget, slots, 40, policy, slots + more_rows)
        limited = tuple(windows[: len(sizes)]) if kind == "paged" else ()
        self.engine = Engine(config, groups, depth, limited, kind, host)
        specs = list(zip(self.engine.allocator.groups, groups, strict=True))
        self.capacity = max(
            n for n in range(1, 41) if all(spec.most_blocks(n, budget) < blocks for spec, (_, blocks) in specs)
        )
        self.add(requests)

    @rule(requests=REQUESTS)
    def add(self, requests: list[Request]) -> None:
        for request in requests:
            room = max(0, self.capacity - request.max_tokens - len(request.tail))
            prompt = ([1, 2, 3, 4, 3, 2, 1] * 3)[: min(request.shared, room)] + request.tail
            fits = len(prompt) + request.max_tokens <= self.capacity
            try:
                self.engine.add(prompt, request.max_tokens, request.n, request.priority, request.salt, request.kind)
            except AdmissionError:
                assert not fits
            else:
                assert fits

    @rule(rounds=st.integers(1, 8), filling=st.booleans())
    def run(self, rounds: int, filling: bool) -> None:
        """Some steps, with the pipeline kept full or not."""
        for _ in range(rounds):
            while len(self.engine.in_flight) < self.engine.depth and self.engine.schedule() and filling:
                self.engine.settle()
            if self.engine.in_flight:
                self.engine.complete()
                self.engine.settle()

    @rule(joining=st.none() | st.integers(0, 9))
    def schedule(self, joining: int | None) -> None:
        if len(self.engine.in_flight) < self.engine.depth:
            self.engine.schedule(joining=joining)

    @rule()
    def complete(self) -> None:
        if self.engine.in_flight:
            self.engine.complete()

    @rule(fault=st.sampled_from(["abort", "finish", "fail", "lose", "alone"]), pick=st.integers(0, 1000))
    def disturb(self, fault: str, pick: int) -> None:
        alive = sorted(self.engine.scheduler.sequences)
        if fault == "lose":
            self.engine.lose()
        elif fault == "fail" and self.engine.in_flight:
            parts = self.engine.in_flight[0][0].sequences
            self.engine.complete(failing=parts[pick % len(parts)].seq_id)
        elif fault == "abort" and alive:
            self.engine.abort(self.engine.sequences[alive[pick % len(alive)]].request_id)
        elif fault == "alone" and alive:
            if len(self.engine.in_flight) < self.engine.depth:
                self.engine.schedule(only=self.engine.sequences[alive[pick % len(alive)]].request_id)
        elif fault == "finish" and alive:  # as by a stop string
            picked = self.engine.sequences[alive[pick % len(alive)]]
            if picked.beam:
                self.engine.abort(picked.request_id)
            else:
                self.engine.scheduler.finish(picked.seq_id)
                self.engine.ended.add(picked.seq_id)

    @invariant()
    def holds(self) -> None:
        self.engine.settle()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()
            self.engine.seen["preemptions"] = self.engine.scheduler.stats().preemptions
            for name, count in self.engine.seen.items():
                event(f"{name}: {count > 0}")


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [3, 40])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", [None, 50, 1000])
def test_many_requests_in_little_memory(block_size: int, depth: int, budget: int, kind: str, host: int | None) -> None:
    """Mixed lengths, samples and shared beginnings, with room for two of the longest."""
    blocks = 1 + -(-80 // block_size)
    config = SchedulerConfig(max_batch_tokens=budget, max_sequences=8, max_model_len=64)
    engine = Engine(config, ((block_size, blocks),), depth, kind=kind, host=host)
    for i in range(24):
        beginning = [1 + j % 4 for j in range(5 * (i % 7))]
        tail = [1 + i * j % 4 for j in range(1, 3 + i % 5)]
        engine.add(beginning + tail, max_tokens=4 + i % 20, n=1 + 2 * (i % 3 == 0))
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.preemptions > 0 or budget == 3
    assert (stats.swaps > 0) == (engine.seen["swaps"] > 0)
    assert bool(stats.swaps) == (host is not None) or host == 50 or budget == 3
    assert len(engine.sequences) == 40 and not engine.ended
    assert bool(engine.seen["pages that lose their memory"]) == (kind == "virtual")


@pytest.mark.parametrize("windows", [(7,), (1,), (None, 7), (5, 12)], ids=str)
@pytest.mark.parametrize("host", [None, 1000])
def test_many_requests_longer_than_their_windows(windows: tuple[int | None, ...], host: int | None) -> None:
    """Windowed pools far smaller than a sequence; warm prefixes among the requests."""
    config = SchedulerConfig(max_batch_tokens=10, max_sequences=8, max_model_len=64)
    groups = tuple((4, {None: 21, 1: 7}.get(window, 12)) for window in windows)
    engine = Engine(config, groups, 2, windows, host=host)
    for i in range(24):
        beginning = [1 + j % 4 for j in range(5 * (i % 7))]
        engine.add([*beginning, 1 + i % 4], max_tokens=4 + i % 27, n=1 + 2 * (i % 3 == 0))
    engine.drain()
    assert engine.seen["blocks behind a window"] > 50 and engine.seen["prefix hits"]
    assert not engine.ended
    # With a window of one token nobody ever needs more blocks than it was admitted with.
    assert bool(engine.scheduler.stats().preemptions) == (windows != (1,))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_beams_in_little_memory_are_swapped(depth: int, kind: str) -> None:
    """A beam may be swapped out while its row is on the way, and be forked once it has come."""
    config = SchedulerConfig(max_batch_tokens=16, max_sequences=8, max_model_len=48)
    engine = Engine(config, ((2, 27),), depth, kind=kind, host=1000)
    for i in range(12):
        kind = ("beams", "plain", "synchronous")[i % 3]
        engine.add([1 + j % 4 for j in range(4 + 3 * (i % 5))], 6 + i, priority=i % 2, kind=kind)
    engine.drain()
    assert engine.seen["swaps"] and engine.seen["forked beams"] and not engine.ended


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("windows", [(None,), (5, 12)], ids=str)
@pytest.mark.parametrize("host", [None, 1000])
def test_guesses_in_little_memory(depth: int, kind: str, windows: tuple[int | None, ...], host: int | None) -> None:
    """Right and wrong ones, of sequences that are preempted in the midst of them, beside others without any."""
    config = SchedulerConfig(max_batch_tokens=16, max_sequences=8, max_model_len=64, max_rows=12)
    groups = tuple((4, 23) for _ in windows)
    engine = Engine(config, groups, depth, windows if kind == "paged" else (), kind, host)
    for i in range(24):
        beginning = [1 + j % 4 for j in range(5 * (i % 7))]
        kind = ("guesses", "guesses", "plain", "guesses", "scores")[i % 5]
        engine.add([*beginning, 1 + i % 4], 4 + i % 27, n=1 + (i % 4 == 0), priority=i % 2, kind=kind)
    engine.drain()
    assert engine.seen["guesses"] > engine.seen["guesses that held"] > 30 and not engine.ended
    assert engine.scheduler.stats().preemptions or windows == (5, 12)
    assert bool(engine.seen["swaps"]) == bool(host and engine.scheduler.stats().preemptions)


def test_what_was_saved_before_a_fault_comes_back_after_it() -> None:
    engine = Engine(SchedulerConfig(64, 4, 64), ((4, 9),), host=1000)
    for prompt in ([1] * 12, [2] * 12):
        engine.add(prompt, 12)
    while not engine.saved:
        assert engine.schedule()
        engine.complete()
        engine.settle()
    engine.lose()
    engine.settle()
    [saved] = engine.saved
    assert engine.scheduler.swapper.held == {saved} and engine.seen["swaps"] == 0
    engine.drain()
    assert engine.seen["swaps"] == 1


def test_what_was_on_its_way_to_the_host_is_computed_again_after_a_fault() -> None:
    engine = Engine(SchedulerConfig(64, 4, 64), ((4, 9),), host=1000)
    for prompt in ([1] * 12, [2] * 12):
        engine.add(prompt, 12)
    while not engine.scheduler.swapper.held:
        assert engine.schedule()
        if not engine.scheduler.swapper.held:
            engine.complete()
    assert not engine.saved
    engine.lose()
    engine.settle()
    assert not engine.scheduler.swapper.held
    engine.drain()


def test_a_warm_cache_gives_the_tokens_of_a_cold_one() -> None:
    engine = Engine(SchedulerConfig(16, 4, 64), ((4, 33),), depth=2)
    prompt = [1, 2, 3, 4, 4, 3, 2, 1, 1, 3, 2, 4]
    for _ in range(2):
        engine.add(list(prompt), 8)
        engine.drain()
    cold, warm = engine.sequences.values()
    assert (cold.num_cached, warm.num_cached) == (0, 8)
    assert cold.output_ids == warm.output_ids


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("blocks", [11, 14, 60])
def test_beams_in_little_room(slots: int, blocks: int) -> None:
    """Beams that find no slot or block for each of them take turns, and beside ordinary requests."""
    engine = Engine(SchedulerConfig(9, slots, 40), ((4, blocks),), depth=2)
    for i in range(4):
        engine.add([1 + j % 4 for j in range(9 * i + 1)], max_tokens=10, kind=("beams", "plain")[i % 2])
    engine.drain()
    assert len(engine.searched) == 2 and not engine.ended
    assert engine.seen["forked beams"]
    assert engine.seen["block copies"] or slots == 1
    assert engine.scheduler.stats().preemptions or slots == 8
