"""Server-sent events, and work that ends when the client has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ClientGoneError, api_error
from .log import log_defect

T = TypeVar("T")
Event = dict[str, Any] | str
_WRITE_S = 120.0
"""A client that takes nothing for so long has gone."""
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Those of Unicode that JSON may have as they are: clients that read a text by lines would cut an event there."""


class EventStream(Response):
    """Sends events as they come, each as ``encode`` writes it. ``close`` is called at the end, whatever happens; a
    client that leaves ends it. A fault in the middle becomes an event that says so."""

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        close: Callable[[], None],
        encode: Callable[[Event], bytes],
        media_type: str,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._encode = encode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(scope["path"], send))
        except ClientGoneError:
            scope["state"]["figures"]["gone"] = True
        finally:
            self._close()

    async def _send(self, path: str, send: Send) -> None:
        await _sent(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events):
            try:
                async for event in self._events:
                    await _sent(send, {"type": "http.response.body", "body": self._encode(event), "more_body": True})
            except (ClientGoneError, OSError):
                raise
            except Exception as error:
                log_defect(error)
                body = self._encode(api_error(error).body(path))
                await _sent(send, {"type": "http.response.body", "body": body, "more_body": True})
        await _sent(send, {"type": "http.response.body", "body": b"", "more_body": False})


async def _sent(send: Send, message: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(_WRITE_S):
            await send(message)
    except (TimeoutError, OSError) as error:
        raise ClientGoneError from error


def line(event: Event) -> str:
    """An event as JSON on a line of its own."""
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)


def encoded(event: Event) -> bytes:
    """An event as bytes of the stream."""
    text = event if isinstance(event, str) else line(event)
    return f"data: {text}\n\n".encode("utf-8", "replace")


async def answered(request: Request, work: Awaitable[T]) -> T:
    """``work``'s result; it is cancelled, and ClientGoneError raised, when the client leaves before."""
    return await unless_gone(request.receive, work)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
