"""Work that runs in order when somebody waits for it, on their thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Lane(Executor):
    """For a device that computes one step at a time: whoever submits a step then waits for it, and to hand it to another thread
    and back costs two wake-ups a step, and the interpreter's lock in between."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = threading.RLock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A future that is done once it, a later one or the end is waited for. RuntimeError after the end."""
        if self._closed:
            raise RuntimeError("The lane is closed.")
        future: _Laned[T] = _Laned(self)
        self._pending.append((future, partial(fn, *args, **kwargs)))
        return future

    def run_until(self, done: Callable[[], bool]) -> None:
        """Runs what is pending, the oldest first, until ``done()`` or nothing is left."""
        with self._running:
            while self._pending and not done():
                future, work = self._pending.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(work())
                    except BaseException as error:
                        future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Runs what is pending, unless that is cancelled."""
        self._closed = True
        if cancel_futures:
            for future, _ in self._pending:
                future.cancel()
        if wait:
            self.run_until(lambda: False)


class _Laned(Future[T]):
    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane

    def result(self, timeout: float | None = None) -> Any:
        self._lane.run_until(self.done)
        return super().result(timeout)
