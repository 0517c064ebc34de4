"""A streaming HTTP client that costs the machine little, so that it measures the server and not itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from engine.errors import UsageError

_LINE = 1 << 20
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Of a delta; thoughts have two names among servers."""


@dataclass
class Answer:
    """One request's times, in seconds of the monotonic clock, and its tokens as the server counts them. ``status`` is 0
    where the connection failed; ``error`` says what went wrong."""

    sent: float
    status: int = 0
    error: str = ""
    times: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those that the server's prefix cache had, where it says so."""

    @property
    def completed(self) -> bool:
        return self.status == 200 and not self.error and bool(self.times)


class Target:
    """A server's endpoint."""

    def __init__(self, url: str, path: str, key: str | None = None) -> None:
        self._url = _parsed(url)
        self._path = self._url.path.rstrip("/").removesuffix("/v1") + path
        self._key = key

    async def ask(self, body: dict[str, Any], timeout_s: float) -> Answer:
        """Sends a request that streams, and notes when its pieces come. Faults are in the answer, never raised."""
        answer = Answer(time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask(body, answer)
        except TimeoutError:
            answer.error = f"no end within {timeout_s:g} s"
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()
        return answer

    async def _ask(self, body: dict[str, Any], answer: Answer) -> None:
        tls = self._url.scheme == "https"
        port = self._url.port or (443 if tls else 80)
        reader, writer = await asyncio.open_connection(self._url.hostname, port, ssl=tls or None, limit=_LINE)
        try:
            writer.write(self._request(json.dumps(body).encode()))
            await writer.drain()
            answer.status, headers = await _head(reader)
            pieces = 0
            async for event in _events(reader, headers):
                if answer.status != 200 or "error" in event:
                    answer.error = _fault(event.get("error", event))
                    continue
                if _text(event):
                    pieces += 1
                    answer.times.append(time.monotonic())
                usage = event.get("usage") or {}
                answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
                answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            answer.output_tokens = answer.output_tokens or pieces
        finally:
            writer.close()

    def _request(self, data: bytes) -> bytes:
        host = self._url.netloc.rpartition("@")[2]
        lines = [f"POST {self._path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(data)}", "Accept: text/event-stream", "Connection: close"]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode() + data


def _parsed(url: str) -> SplitResult:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"The URL is {url!r}; it must be a server's, such as http://localhost:8000.")
    return parts


def _fault(error: Any) -> str:
    """The sentence of an error, in OpenAI's form or another."""
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = (await reader.readline()).split()
    if len(status) < 2 or not status[1].isdigit():
        raise ValueError("the server speaks no HTTP")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status[1]), headers


async def _events(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of a stream of events, or that of a whole body."""
    stream = "text/event-stream" in headers.get("content-type", "")
    rest = b""
    async for data in _body(reader, headers):
        rest += data
        while stream and b"\n" in rest:
            line, _, rest = rest.partition(b"\n")
            value = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and value != b"[DONE]":
                yield _object(value)
    if not stream:
        yield _object(rest)


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    return value if isinstance(value, dict) else {"error": value}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    while data := await reader.read(1 << 16):
        yield data


def _text(event: dict[str, Any]) -> bool:
    """Whether an event has some text of any kind."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in _TEXTS):
            return True
    return False
