"""A run: requests sent at their times, and their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from .client import Answer, Target
from .load import Ask


@dataclass(frozen=True, kw_only=True)
class How:
    """How prompts are asked. ``chat``: as conversations; ``options``: further fields of each request."""

    target: Target
    model: str
    chat: bool = False
    options: dict[str, Any]
    concurrency: int | None = None
    timeout_s: float = 3600.0

    def body(self, ask: Ask) -> dict[str, Any]:
        content = {"messages": [{"role": "user", "content": ask.prompt}]} if self.chat else {"prompt": ask.prompt}
        shared = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        return {**shared, **content, "max_tokens": ask.output_tokens, **self.options}


async def run(
    how: How, asks: Sequence[Ask], times: Sequence[float], progress: Callable[[int], None] = lambda done: None
) -> tuple[list[Answer], float]:
    """The answers, and the seconds from the first request to the last answer's end."""
    gate = asyncio.Semaphore(how.concurrency) if how.concurrency else None
    start = time.monotonic()
    done = 0

    async def one(ask: Ask, at: float) -> Answer:
        nonlocal done
        await asyncio.sleep(max(start + at - time.monotonic(), 0))
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
            answer = await how.target.ask(how.body(ask), how.timeout_s)
        done += 1
        progress(done)
        return answer

    answers = await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, times, strict=True)))
    return answers, max((a.ended for a in answers), default=start) - start
