"""Connections: how many there may be, how long a request's head may take, and what h11 leaves open of HTTP."""

from __future__ import annotations

import asyncio
import re
import resource
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .log import log

_HEAD_S = 10.0
"""A request's head must have come by then; a connection that has none of it after an answer is closed by uvicorn, later."""
ACCEPTED = 16
"""Connections that are accepted in one turn of the event loop."""
_OTHER_FILES = 64
"""Open files that are left to others, and to connections that are accepted but not counted yet, of a few turns."""
_FREE_CHUNKS, _BYTES_A_CHUNK = 4096, 256
"""A body may have so many chunks, and one more for each so many bytes: h11 takes 10 us for each."""
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_ORIGIN = re.compile(rb"https?://[^/?]*", re.IGNORECASE)


def most_connections() -> int:
    """As many as the limit of open files has room for."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if limit == resource.RLIM_INFINITY else max(limit - _OTHER_FILES, limit // 2)


class Connection(H11Protocol):
    """uvicorn's, closed where a head does not come, or where there are too many others."""

    conn: _Parser

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser()
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._head = self.loop.call_later(_HEAD_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._come()
        elif self._head is None:
            self._head = self.loop.call_later(_HEAD_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._come()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        log("no_request", error=self.conn.refusal or msg)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.refusal or msg)
        else:  # an answer has begun
            self.transport.close()

    def _come(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


class _Parser(h11.Connection):
    """h11's, which refuses bodies of too many small chunks, and knows targets that are whole URLs. Chunks of answers, of which
    a stream has one for each event, are written here: h11 would take five times as long to find that they are in order."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self.refusal: str | None = None
        self._chunks = self._bytes = 0
        self._streams = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # its overloads say the same
        if self._streams and type(event) is h11.Data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        written = super().send(event)
        self._streams = isinstance(event, h11.Response) and _CHUNKED in (written or b"").lower()
        return written

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > _FREE_CHUNKS + self._bytes // _BYTES_A_CHUNK:
                self.refusal = f"The body has too many chunks; send them of {_BYTES_A_CHUNK} bytes at least."
                raise h11.RemoteProtocolError(self.refusal)
        elif isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            return _usual(event)
        return event


def _usual(request: h11.Request) -> h11.Request:
    """With a path as its target where that is a whole URL (RFC 9112, 3.2.2), and the last of its connection where its length
    is told in two ways (6.1)."""
    target, headers = request.target, list(request.headers)
    if origin := _ORIGIN.match(target):
        path = target[origin.end() :]
        target = path if path.startswith(b"/") else b"/" + path
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        headers.append(CLOSE_HEADER)
    elif origin is None:
        return request
    return h11.Request(method=request.method, target=target, headers=headers, http_version=request.http_version)
