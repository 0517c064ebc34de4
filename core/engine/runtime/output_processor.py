"""Stage 3's thread: tokens become text, and outputs go to the callers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import RequestError
from .request import Request

Finish = Callable[[Request, int], None]
"""Ends a continuation of a request."""


class TokenEvent(NamedTuple):
    """A token of a continuation, its logprobs, and whether and why the sequence ended with it."""

    request: Request
    continuation: int
    token: int | None
    logprobs: Mapping[int, float] | None
    is_stop: bool
    finish_reason: str | None
    stop_reason: str | int | None
    time: float


class OutputProcessor:
    """The thread that turns tokens into text and hands outputs to their sinks."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[list[TokenEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="engine-detokenize", daemon=True)

    def start(self, finish: Finish) -> None:
        self._finish: Finish | None = finish
        self._thread.start()

    def put(self, events: list[TokenEvent]) -> None:
        self._events.put(events)

    def close(self) -> None:
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._finish = None  # it refers to the loop, and the loop to this: Python would not free them at once

    def _main(self) -> None:
        while (events := self._events.get()) is not None:
            self.process(events)

    def process(self, events: list[TokenEvent]) -> None:
        """What the thread does with a step's tokens."""
        told: dict[Callable[[], None], None] = {}
        for event in events:
            try:
                self._take(event)
            except Exception as error:  # one request's sink or text must not end the others
                self._fail(event, error)
            if event.request.told is not None:
                told[event.request.told] = None
        for tell in told:
            tell()

    def _take(self, event: TokenEvent) -> None:
        request, c = event.request, event.request.continuations[event.continuation]
        if c.finish_reason is not None:
            return
        if event.token is not None:
            request.first_token = request.first_token or event.time
            request.last_token = event.time
            request.watch.token(event.continuation, event.time)
            if c.push(event.token, event.logprobs, event.is_stop) and event.finish_reason is None:
                self._stop(request, event.continuation)
        if event.finish_reason is not None:
            c.end(event.finish_reason, event.stop_reason)
        if c.finish_reason is not None:
            request.watch.ended(event.continuation, event.time, c.finish_reason)
        if request.stream or request.finished:
            request.sink(request.output())

    def _fail(self, event: TokenEvent, error: Exception) -> None:
        c = event.request.continuations[event.continuation]
        c.finish_reason, c.stop_reason = "error", f"{RequestError.__name__}: {error}"
        self._stop(event.request, event.continuation)
        try:
            event.request.watch.ended(event.continuation, event.time, c.finish_reason)
            event.request.sink(event.request.output())
        except Exception:  # the sink itself is broken; nobody is left to tell
            return

    def _stop(self, request: Request, index: int) -> None:
        if self._finish is not None:
            self._finish(request, index)
