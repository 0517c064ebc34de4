"""What a scheduler is told once, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SchedulerError
from ..kv import HostStats, PoolStats
from .policy import POLICIES


@dataclass(frozen=True)
class SchedulerConfig:
    """``max_batch_tokens``: token budget of a step. ``max_sequences``: slots, so sequences running at a time.
    ``max_model_len``: tokens of a sequence, prompt and output. ``max_rows``: rows of a step that reach the head; one a
    sequence if not given.
    """

    max_batch_tokens: int
    max_sequences: int
    max_model_len: int
    policy: str = "fcfs"
    max_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_sequences", "max_model_len"):
            if getattr(self, name) < 1:
                raise SchedulerError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.rows < self.max_sequences:
            raise SchedulerError(f"max_rows is {self.rows}; it must be at least max_sequences, {self.max_sequences}")
        check_policy(self.policy)

    @property
    def rows(self) -> int:
        return self.max_sequences if self.max_rows is None else self.max_rows


def check_policy(name: str) -> None:
    """SchedulerError where there is no such policy."""
    if name not in POLICIES:
        raise SchedulerError(f"There is no scheduling policy {name!r}; known are: {', '.join(sorted(POLICIES))}.")


@dataclass(frozen=True)
class SchedulerStats:
    """Counts as of now; ``preemptions`` since the start, and how many of them swapped. ``pools``: block counts a cache
    group; ``host``: the host tier's bytes, where there is one."""

    waiting: int
    running: int
    steps_in_flight: int
    preemptions: int
    pools: tuple[PoolStats, ...]
    swaps: int = 0
    host: HostStats | None = None
