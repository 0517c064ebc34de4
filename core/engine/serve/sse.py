"""Server-sent events, and work that ends when the client has left."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientGoneError, api_error
from .log import log_defect

T = TypeVar("T")
Event = dict[str, Any] | str
_WRITE_S = 120.0
"""A client that takes nothing for so long has gone."""
_LINE_ENDS = [(end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029"]
"""Those of Unicode that JSON may have as they are: clients that read a text by lines would cut an event there."""


class EventStream(Response):
    """Sends events as they come, each as ``encode`` writes it; they are made of ``source``, which is closed after them.
    ``done`` is called when they have ended by themselves, and ``close`` in the end, whatever happens; a client that leaves ends
    it. A fault in the middle becomes an event that says so."""

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        source: AsyncGenerator[Any, None],
        done: Callable[[], None],
        close: Callable[[], None],
        encode: Callable[[Event], bytes],
        media_type: str,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._done = done
        self._close = close
        self._encode = encode
        self._sending: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless(self._send(scope["path"], send), _gone(receive), self._blocked())
        except ClientGoneError:
            scope["state"]["figures"]["gone"] = True
        finally:
            self._close()

    async def _send(self, path: str, send: Send) -> None:
        await self._sent(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._source), aclosing(self._events):
            try:
                async for event in self._events:
                    body = self._encode(event)
                    await self._sent(send, {"type": "http.response.body", "body": body, "more_body": True})
                self._done()
            except (ClientGoneError, OSError):
                raise
            except Exception as error:
                log_defect(error)
                body = self._encode(api_error(error).body(path))
                await self._sent(send, {"type": "http.response.body", "body": body, "more_body": True})
        await self._sent(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _sent(self, send: Send, message: dict[str, Any]) -> None:
        self._sending = time.monotonic()
        try:
            await send(message)
        except OSError as error:
            raise ClientGoneError from error
        self._sending = None

    async def _blocked(self) -> None:
        """Returns when the client has taken nothing for too long."""
        while self._sending is None or time.monotonic() - self._sending < _WRITE_S:
            await asyncio.sleep(_WRITE_S / 10)


def line(event: Event) -> bytes:
    """An event as JSON on a line of its own."""
    try:
        text = to_json(event)
    except PydanticSerializationError:  # half a surrogate pair
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    for end, written in _LINE_ENDS:
        text = text.replace(end, written)
    return text


def encoded(event: Event) -> bytes:
    """An event as bytes of the stream."""
    return b"data: " + (event.encode() if isinstance(event, str) else line(event)) + b"\n\n"


async def answered(request: Request, work: Awaitable[T]) -> T:
    """``work``'s result; it is cancelled, and ClientGoneError raised, when the client leaves before."""
    return await _unless(work, _gone(request.receive))


async def _unless(work: Awaitable[T], *leaving: Awaitable[None]) -> T:
    """``work``'s result; it is cancelled, and ClientGoneError raised, when one of the others is done before."""
    working = asyncio.ensure_future(work)
    tasks = [working, *map(asyncio.ensure_future, leaving)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
