"""A request on its way to an event loop: it is admitted there, and its outputs come there from stage 3's thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial

from ..errors import EngineError
from .engine import Engine
from .outputs import RequestOutput
from .request import Request

_CHECK_S = 1.0
"""Between looks at whether the engine makes progress, of each request."""


class Prepared:
    """A checked request that is not admitted yet; with a ``gate`` it is admitted when that lets it in."""

    def __init__(self, engine: Engine, request: Request, latest: Latest, gate: asyncio.Semaphore | None = None) -> None:
        request.told = latest.post.wake
        self.request = request
        self._engine = engine
        self._latest = latest
        self._gate = gate
        self._admitted: asyncio.Future[None] | None = None
        self._checking: asyncio.TimerHandle | None = None

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Admits the request and gives its outputs; may be called once. Leaving the iterator aborts the request. Raises
        AdmissionError if it can never fit, and what ``interrupt`` was given."""
        leave = await self._enter()
        finished = False
        try:
            await self._admit()
            while not finished:
                output = await self._latest.get()
                finished = output.finished
                yield output
        finally:
            if self._checking is not None:
                self._checking.cancel()
            if self._admitted is not None and not finished:
                self._engine.abandon(self.request)
            leave()

    def interrupt(self, error: Exception) -> None:
        """Ends the wait for the request's next output, or for its admission; of the gate's it does not. On the event loop."""
        self._latest.fail(error)
        if self._admitted is not None:
            _settle(self._admitted, error)

    async def ended(self) -> None:
        """Waits until the engine has done all of it, whether or not its outputs are taken."""
        await self._latest.ended.wait()

    async def last(self) -> RequestOutput:
        """The last of ``outputs``."""
        async with aclosing(self.outputs()) as outputs:
            found = [output async for output in outputs]
        return found[-1]

    async def _enter(self) -> Callable[[], None]:
        """Passes the gate. Others may once the engine has done the request, whoever reads its outputs, or the caller leaves."""
        if self._gate is None:
            return lambda: None
        await self._gate.acquire()
        held = [self._gate]

        def leave() -> None:
            while held:
                held.pop().release()

        self._latest.when_ended = leave
        return leave

    async def _admit(self) -> None:
        loop = asyncio.get_running_loop()
        self._engine.check_progress()
        admitted = self._admitted = loop.create_future()

        def done(error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(partial(_settle, admitted, error))

        self._engine.admit_soon(self.request, done)
        self._check_later()
        await admitted

    def _check_later(self) -> None:
        self._checking = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        try:
            self._engine.check_progress()
        except EngineError as error:
            self.interrupt(error)
        else:
            self._check_later()


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():  # cancelled, or interrupted
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class Post:
    """Brings outputs to an event loop, which is woken once for all of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._new: deque[Latest] = deque()
        self._waking = False

    def put(self, latest: Latest) -> None:
        """On stage 3's thread."""
        if self.loop.is_closed():
            raise RuntimeError("the event loop of a request is closed")
        self._new.append(latest)

    def wake(self) -> None:
        """On stage 3's thread."""
        if self._new and not self._waking:
            self._waking = True
            with suppress(RuntimeError):  # closed meanwhile
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # first: what is put from now on wakes it again
        while self._new:
            self._new.popleft().arrive()


class Latest:
    """Where stage 3 leaves a request's output for an event loop: the latest alone, so that a slow reader keeps no memory."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.ended = asyncio.Event()
        self.when_ended: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._finished = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """On stage 3's thread."""
        with self._lock:
            waking, self._output = self._output is None, output
            self._finished = output.finished
        if waking or output.finished:
            self.post.put(self)

    def arrive(self) -> None:
        """There is an output, or there was. On the event loop."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self._finished and not self.ended.is_set():
            self.ended.set()
            self.when_ended()

    def fail(self, error: Exception) -> None:
        """What the reader gets in place of an output, but the last one. On the event loop."""
        self._error = error
        self.arrive()

    async def get(self) -> RequestOutput:
        while self._output is None and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        with self._lock:
            output, self._output = self._output, None
        if output is not None and (self._error is None or output.finished):
            return output
        assert self._error is not None
        raise self._error
