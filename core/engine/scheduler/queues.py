"""Where sequences are: those that wait and those that run, the slots of the latter, and which belong to one request."""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush

from .policy import Policy
from .sequence import NO_SLOT, Sequence, SequenceStatus


class Queues:
    """``waiting`` and ``running`` are in policy order. A branch that is not forked yet is in neither, but in ``unforked`` of the
    sequence that computes its prompt. There are ``slots`` of them for those that run."""

    def __init__(self, policy: Policy, slots: int) -> None:
        self._policy = policy
        self.sequences: dict[int, Sequence] = {}
        self.requests: dict[str, list[Sequence]] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.slots = list(range(slots))
        """Those that nobody has, as a heap."""
        self._all_slots = slots

    def enter(self, sequence: Sequence) -> None:
        """It is known from now on; where it is, ``wait``, ``start`` or another's ``unforked`` says."""
        self.sequences[sequence.seq_id] = sequence
        self.requests.setdefault(sequence.request_id, []).append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Of one that waits, or is stopped. Branches that it was to be forked into wait as ordinary sequences."""
        if sequence.status is SequenceStatus.WAITING:
            siblings = (other.unforked for other in self.requests[sequence.request_id])
            next(place for place in (self.waiting, *siblings) if sequence in place).remove(sequence)
        for child in sequence.unforked:
            self.wait(child)
        sequence.unforked = []
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.seq_id]
        branches = self.requests[sequence.request_id]
        branches.remove(sequence)
        if not branches:
            del self.requests[sequence.request_id]

    def wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=self._policy)

    def start(self, sequence: Sequence) -> None:
        """It runs in the lowest slot that is left."""
        sequence.slot = heappop(self.slots)
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=self._policy)

    def stop(self, sequence: Sequence) -> None:
        """It runs no more, and must ``wait`` or ``leave``."""
        heappush(self.slots, sequence.slot)
        sequence.slot = NO_SLOT
        self.running.remove(sequence)

    def first_waiting(self, only: str | None) -> Sequence | None:
        """Of the request ``only``, or of all."""
        candidates = (sequence for sequence in self.waiting if only in (None, sequence.request_id))
        return next((sequence for sequence in candidates if not sequence.held), None)

    def last_held(self) -> Sequence | None:
        return next((sequence for sequence in reversed(self.running) if sequence.held), None)

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken (tests)."""
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=self._policy), "a queue is out of order"
        slots = sorted([*self.slots, *(sequence.slot for sequence in self.running)])
        assert slots == list(range(self._all_slots)), "a slot is lost or held twice"
        places = self.places()
        assert len(places) == len(self.sequences) and set(places) == set(self.sequences.values()), "a sequence is lost"
        assert set(places) == {sequence for group in self.requests.values() for sequence in group}
        for sequence in places:
            running = sequence in self.running
            assert running == (sequence.slot != NO_SLOT) == (sequence.status is SequenceStatus.RUNNING)

    def places(self) -> list[Sequence]:
        """All sequences, found where they are."""
        unforked = [child for sequence in self.sequences.values() for child in sequence.unforked]
        return [*self.waiting, *self.running, *unforked]
