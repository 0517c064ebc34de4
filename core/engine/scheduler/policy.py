"""Policies: who goes first, and, from the other end, who is preempted first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .sequence import Sequence

Policy = Callable[[Sequence], tuple[int, ...]]


def fcfs(sequence: Sequence) -> tuple[int, ...]:
    """First come, first served."""
    return sequence.arrival, sequence.branch


def priority(sequence: Sequence) -> tuple[int, ...]:
    """The lowest priority value first; among equals, first come, first served."""
    return sequence.priority, sequence.arrival, sequence.branch


POLICIES: Mapping[str, Policy] = {"fcfs": fcfs, "priority": priority}
