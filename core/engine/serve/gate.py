"""What every request passes: an id, the key, the size of its body, and a line in the log."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .bulk import check_bulk
from .errors import GONE, ApiError, ClientGoneError, api_error
from .keys import Keys
from .lanes import LoopTurns, beside, body_bytes, lane
from .log import log, log_defect
from .models import in_use
from .tracing import Tracing, current

_OPEN = ("/health", "/health/live", "/health/ready", "/health/progress", "/")
"""Paths that ask for no key."""
_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
_BODY_S = 60.0
"""A body must have come by then."""
_BODIES = 32
"""All bodies together may be so many times as large as one."""
_DISCARD_S, _SILENCE_S = 10.0, 0.5
"""For how long a refused body is read on, and how long it may pause."""


def _of_ollama(scope: Scope) -> Scope:
    """Ollama's programs, and curl, do not say that a body is JSON. Pages of others could send such a body, too, without asking
    before, so that what has an origin must say so."""
    headers = MutableHeaders(raw=list(scope["headers"]))
    if "origin" not in headers:
        headers["content-type"] = "application/json"
    return {**scope, "headers": headers.raw}


class _Bodies:
    """Bytes of all bodies that have come, of requests that are not answered yet."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """One request's: a function that takes so many bytes more, which are given back in the end. ApiError 503 where there
        is no room for them."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._held + size > self._most:
                raise ApiError(503, "Too many large bodies are on their way; try again in 5 s.", retry_s=5)
            self._held += size
            taken += size

        try:
            yield take
        finally:
            self._held -= taken


class Gate:
    """Around an application: ``scope["state"]`` gets ``request_id``, ``caller`` and ``figures``, a dict for the log. The
    body is read whole before the application sees the request."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        max_body: int,
        logs: Callable[..., None] = log,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body = max_body
        self._bodies = _Bodies(max_body * _BODIES)
        self._turns = LoopTurns()
        self._log = logs
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        # Answered as without the slash: behind a proxy nobody here knows where to redirect to.
        scope = {**scope, "path": scope["path"].removesuffix("/") or "/"}
        scope = _of_ollama(scope) if scope["path"].startswith("/api/") else scope
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        figures: dict[str, object] = {}
        scope.setdefault("state", {}).update(request_id=request_id, figures=figures)
        trace = self._tracing and self._tracing.begin(scope["method"], scope["path"], headers, request_id)
        if trace:
            current.set(trace)
            figures["trace_id"] = trace.trace_id
        status: list[int] = []

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if scope["path"].startswith("/v1/messages"):
                    MutableHeaders(scope=message)["request-id"] = request_id  # which Anthropic's clients read
                if message["status"] in (408, 413):  # the rest of the body is not read
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            scope["state"]["caller"] = self._caller(scope, headers)
            with self._bodies.share() as take, in_use():
                whole = await self._whole(headers, receive, take)
                asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # its body is not sent
                await self._app(asked, whole, tell)
        except ClientGoneError:  # before all of the body has come
            figures["gone"] = True
            status.append(GONE)
        except asyncio.CancelledError:  # by uvicorn alone, which has waited for as long as it may and ends
            figures["cut"] = True
            if not status:
                ended = ApiError(503, "The server is shutting down.", code="shutting_down", retry_s=5)
                await ended.response(scope["path"])(scope, receive, tell)
        except Exception as error:
            log_defect(error, request_id)
            if not status:
                await api_error(error).response(scope["path"])(scope, receive, tell)
        finally:
            if trace:
                trace.close(status[0] if status else None, "gone" in figures)
            self._log(
                "request",
                request_id=request_id,
                caller=scope["state"].get("caller"),
                method=scope["method"],
                path=scope["path"],
                status=status[0] if status else None,
                seconds=round(time.monotonic() - start, 4),
                **figures,
            )

    def _caller(self, scope: Scope, headers: Headers) -> str:
        if scope["path"] in _OPEN:
            return "-"
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        key = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key")
        caller = self._keys.caller(key)
        if caller is None:
            wrong = "This key is not known" if key else "A key is missing"
            raise ApiError(401, f"{wrong}; send a known one as Authorization: Bearer KEY.", code="invalid_api_key")
        return caller

    async def _whole(self, headers: Headers, receive: Receive, take: Callable[[int], None]) -> Receive:
        """A ``receive`` that has the whole body at once. ApiError 413 if it is too large, 415 if it is encoded, 400 if it has
        too many parts, 408 if it does not come, 503 if ``take`` has no room for it."""
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body:
            if "expect" not in headers:  # else nothing comes before it is asked for
                await _discard(receive)
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    take(len(part))
                    body += part
                    if len(body) > self._max_body:
                        body.clear()
                        await _discard(receive)
                        raise self._too_large()
                    if not message.get("more_body"):
                        break
        except TimeoutError as error:
            raise ApiError(408, f"The body did not come within {_BODY_S:g} s.") from error
        if (encoding := headers.get("content-encoding", "")).lower() not in ("", "identity"):
            raise ApiError(415, f"The body is encoded as {encoding}; send it as it is.")
        body_bytes.set(len(body))
        given = bytes(body)
        if lane() is None:
            check_bulk(given)
        else:
            await beside(lambda: check_bulk(given))
            await self._turns.take()  # the application parses it at once
        whole: list[Message] = [{"type": "http.request", "body": given, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_body} bytes, the most that is taken.")


async def _discard(receive: Receive) -> None:
    """What is still to come of a body that is refused: a client that is cut off while it sends does not see why."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            more = True
            while more:
                more = (await asyncio.wait_for(receive(), _SILENCE_S)).get("more_body", False)
