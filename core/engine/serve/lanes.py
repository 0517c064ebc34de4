"""Threads for what takes long, and turns for what holds up the event loop: large requests go one after the other, and so do
grammars, so that nobody else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
body_bytes: ContextVar[int] = ContextVar("body_bytes", default=0)
"""Size of the body of the request that this task answers."""
_LARGE = 256 << 10
_slow = ThreadPoolExecutor(1, thread_name_prefix="engine-large")
_forms = ThreadPoolExecutor(1, thread_name_prefix="engine-forms")


def lane() -> Executor | None:
    """Where work for this task's request is done; None is the event loop's own threads."""
    return _slow if body_bytes.get() > _LARGE else None


async def beside(work: Callable[[], T]) -> T:
    """What ``work`` gives, done beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(lane(), work)


async def compiling(work: Callable[[], T]) -> T:
    """What ``work`` gives, which is to compile a grammar. It is not begun if the caller is cancelled before its turn."""
    return await asyncio.get_running_loop().run_in_executor(_forms, work)


def later(work: Callable[[], object]) -> None:
    """Has ``work`` done beside the event loop; nobody waits for it."""
    asyncio.get_running_loop().run_in_executor(lane(), work)


class LoopTurns:
    """On the event loop, for what holds it up: one after the other, and after each the loop has as long for all else."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def take(self) -> None:
        """Returns when it is the caller's turn, which lasts until the caller next waits for anything."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        start = loop.time()

        def ended() -> None:
            loop.call_later(loop.time() - start, self._free.release)

        loop.call_soon(ended)
