"""What the scheduler's tests share: a small scheduler, requests for it, and steps done in one call."""

from __future__ import annotations

from engine.kv import CacheGroup, PagedAllocator
from engine.scheduler import ScheduledStep, Scheduler, SchedulerConfig, Sequence


def build(
    blocks: int = 100,
    block_size: int = 4,
    budget: int = 64,
    slots: int = 8,
    context: int = 200,
    policy: str = "fcfs",
) -> Scheduler:
    allocator = PagedAllocator((CacheGroup("full", "full", block_size),), (blocks + 1,))
    return Scheduler(SchedulerConfig(budget, slots, context, policy), allocator)


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
    return [(part.seq_id, part.start, part.num_tokens, part.emits) for part in step.sequences]


def used(scheduler: Scheduler) -> int:
    return scheduler.stats().pools[0].used
