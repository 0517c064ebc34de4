"""Preemption by swapping: the blocks of a preempted sequence wait in host memory, and come back into fresh ones.

A sequence's cache is exported with the step that follows its preemption, before anything is written by that step, and
may come back once that step is done: what is saved has then been computed for sure. Only the blocks that its later
queries see are saved; blocks that it shares stay with the others, and come back as copies of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import SchedulerError
from ..kv import BlockTable, CacheGroup, HostPool, PrefixHit
from .sequence import Sequence
from .step import ScheduledStep, Swap


class Swapper:
    """Who is swapped out. Without a host pool nobody is."""

    def __init__(self, pool: HostPool | None, groups: tuple[CacheGroup, ...]) -> None:
        if pool is not None and len(pool.block_bytes) != len(groups):
            raise SchedulerError(
                f"the host pool knows blocks of {len(pool.block_bytes)} cache groups; the allocator has {len(groups)}"
            )
        self.pool = pool
        self.outs = 0
        self._groups = groups
        self._tokens: dict[int, int] = {}
        self._leaving: dict[int, Swap] = {}  # to be exported with the next step
        self._ready: set[int] = set()

    @property
    def held(self) -> frozenset[int]:
        """The sequences whose blocks are in host memory, or on the way there."""
        return frozenset(self._tokens)

    def take_out(self, sequence: Sequence, tables: tuple[BlockTable, ...]) -> None:
        """Swaps out a sequence that is being preempted, if there is room on the host and a use for it."""
        seq_id, computed = sequence.seq_id, sequence.num_computed
        if self.pool is None or sequence.exhausted:
            return
        blocks = self._live(tables, computed)
        if self.pool.take(seq_id, [len(table) for table in blocks]):
            self._tokens[seq_id] = computed
            self._leaving[seq_id] = Swap(seq_id, blocks)
            self.outs += 1

    def is_under_way(self, seq_id: int) -> bool:
        """Whether a step that saves the sequence's blocks is in flight."""
        return seq_id in self._tokens and seq_id not in self._ready and seq_id not in self._leaving

    def hit(self, sequence: Sequence) -> PrefixHit | None:
        """What the sequence would get back, or None where it must be computed again."""
        tokens = self._tokens.get(sequence.seq_id)
        if tokens is None:
            return None
        # Before a fork there may be nothing left to compute, and a sequence runs to compute something. One that leaves is
        # not saved: no step came between. And a wrong guess that was saved is one token too many.
        if tokens >= sequence.goal or sequence.seq_id in self._leaving:
            self.drop((sequence.seq_id,))
            return None
        return PrefixHit(tokens, ((),) * len(self._groups))

    def take_in(self, seq_id: int, tables: tuple[BlockTable, ...]) -> Swap:
        """The sequence runs again, in these tables. The host's room is free for the steps after the one that is built."""
        blocks = self._live(tables, self._tokens[seq_id])
        self.drop((seq_id,))
        return Swap(seq_id, blocks)

    def issue(self) -> tuple[Swap, ...]:
        """What the step being issued saves."""
        swaps = tuple(self._leaving.values())
        self._leaving.clear()
        return swaps

    def complete(self, step: ScheduledStep) -> None:
        """The step is done, and what it saved may come back."""
        self._ready.update(swap.seq_id for swap in step.swap_outs if swap.seq_id in self._tokens)

    def reset(self) -> None:
        """The device lost its state. What was saved by steps that are done is good; the rest is computed again."""
        self.drop(tuple(self._tokens.keys() - self._ready))

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Gives up what is saved of these sequences, if anything."""
        for seq_id in seq_ids:
            self._tokens.pop(seq_id, None)
            self._leaving.pop(seq_id, None)
            self._ready.discard(seq_id)
            if self.pool is not None:
                self.pool.give(seq_id)

    def _live(self, tables: tuple[BlockTable, ...], computed: int) -> tuple[BlockTable, ...]:
        """The blocks that hold what the queries after ``computed`` tokens see."""
        return tuple(
            table[group.behind(computed) : group.blocks(computed)]
            for group, table in zip(self._groups, tables, strict=True)
        )
