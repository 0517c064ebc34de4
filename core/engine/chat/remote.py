"""Answers of a server that speaks OpenAI's protocol."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from engine.answers import closes_reasoning, split_reasoning
from engine.errors import EngineError, RequestError, UsageError

from .answer import Answer, Ask, Reading, TooLongError, Usage
from .conversation import ToolCall, with_calls, without_reasoning

_CONNECT_S, _SILENCE_S = 10.0, 600.0
_MAX_LINE = 16 << 20


class ServerError(EngineError):
    """The server cannot be reached, or it refuses."""


class Remote:
    """A model behind ``url``; the first that the server names unless ``model`` is given."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        self._url = _base(url)
        self._key = api_key
        models = self._models()
        self.name = model or (str(models[0].get("id")) if models else "")
        if not self.name:
            raise ServerError(f"{url} names no model; name one: engine chat MODEL --attach URL.")
        self.limit = next((_limit(m) for m in models if m.get("id") == self.name), None)

    @property
    def reference(self) -> str:
        return self.name

    def _models(self) -> list[dict[str, Any]]:
        connection, response = self._send("GET", "/models", None)
        with connection_closed(connection):
            try:
                found = list(json.loads(response.read(_MAX_LINE)).get("data") or ())
            except (ValueError, AttributeError, TypeError) as error:
                raise ServerError(f"{self._url.geturl()} does not speak OpenAI's protocol: {error}.") from error
        return [model for model in found if isinstance(model, dict)]

    def close(self) -> None:
        """Nothing is kept open between answers."""

    def hears(self, variable: str) -> bool:
        return True  # the server's affair

    def count(self, ask: Ask) -> int | None:
        return None

    @property
    def sampling(self) -> None:
        return None

    def exact(self, ask: Ask) -> list[str]:
        return [
            f"POST {self._url.geturl()}/chat/completions",
            json.dumps(self._body(ask), ensure_ascii=False, indent=2),
        ]

    def info(self) -> list[tuple[str, str]]:
        return [
            ("model", self.name),
            ("server", self._url.geturl()),
            ("context", f"{self.limit} tokens" if self.limit else "not told by the server"),
        ]

    def _body(self, ask: Ask) -> dict[str, Any]:
        options = {name: value for name, value in ask.options.items() if value is not None}
        body = {"model": self.name, "messages": without_reasoning(ask.messages), "stream": True}
        body |= {"stream_options": {"include_usage": True}, **options}
        if ask.tools:
            body["tools"] = list(ask.tools)
        if ask.variables:
            body["chat_template_kwargs"] = dict(ask.variables)
        if ask.form is not None:
            body |= _form(ask.form)
        return body

    def answer(self, ask: Ask, reading: Reading) -> Generator[Answer, None, None]:
        start = time.monotonic()
        connection, response = self._send("POST", "/chat/completions", self._body(ask))
        gathered = _Gathered(start)
        with connection_closed(connection):
            for event in _events(response):
                if event.get("error") is not None:
                    raise RequestError(f"The server ended the answer: {_reason(event)}.")
                with _in_form():
                    answer = gathered.answer(None) if gathered.take(event) else None
                if answer is not None:
                    yield answer
        if gathered.finish_reason is None:
            raise ServerError("The connection to the server broke off in the middle of the answer.")
        with _in_form():
            answer = gathered.answer(gathered.finish_reason)
        yield answer

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=_CONNECT_S)
        headers = {"Accept": "text/event-stream, application/json", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.connect()
            connection.sock.settimeout(_SILENCE_S)
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._url.path + path, payload, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, socket.gaierror) as error:
            connection.close()
            raise ServerError(f"{self._url.geturl()} cannot be reached: {_said(error)}.") from error
        if response.status != 200:
            with connection_closed(connection):
                text = response.read(1 << 16).decode("utf-8", errors="replace")
            refusal = TooLongError if _is_too_long(response.status, text) else RequestError
            raise refusal(f"The server refuses with {response.status}: {_explained(text)}.")
        return connection, response


class connection_closed:  # noqa: N801 - reads as a statement
    """Closes a connection at the end; what breaks off within is a ServerError."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._connection.close()
        if isinstance(error, OSError | http.client.HTTPException):
            raise ServerError(f"The connection to the server broke off: {_said(error)}.") from error


@contextmanager
def _in_form() -> Iterator[None]:
    """What is read within is as OpenAI's protocol has it, or a ServerError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ServerError("The server sent an event that is not of OpenAI's form.") from error


class _Gathered:
    """An answer put together from the deltas of a stream."""

    def __init__(self, start: float) -> None:
        self.finish_reason: str | None = None
        self._start = start
        self._first: float | None = None
        self._last = start
        self._text = self._reasoning = ""
        self._calls: dict[int, dict[str, str]] = {}
        self._usage: Mapping[str, Any] = {}
        self._pieces = 0

    def take(self, event: Mapping[str, Any]) -> bool:
        """Whether there is more to show."""
        self._usage = event.get("usage") or self._usage
        choice = (event.get("choices") or [{}])[0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or {}
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            self._take_call(call)
        if not (text or reasoning):
            return False
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._text += text
        self._reasoning += reasoning
        self._pieces += 1
        return True

    def _take_call(self, call: Mapping[str, Any]) -> None:
        known = self._calls.setdefault(int(call.get("index") or 0), {"id": "", "name": "", "arguments": ""})
        function = call.get("function") or {}
        known["id"] = call.get("id") or known["id"]
        known["name"] += function.get("name") or ""
        known["arguments"] += function.get("arguments") or ""

    def answer(self, finish_reason: str | None) -> Answer:
        finished = finish_reason is not None
        text = _joined(self._text, finished)
        inside, shown, thinking = split_reasoning(text, closes_reasoning(text), finished)
        reasoning = _joined(self._reasoning, finished) or inside
        waiting = not finished and (thinking or (bool(self._reasoning) and not self._text))
        calls, cut = self._read_calls(finish_reason)
        text, shown = with_calls(text, cut), with_calls(shown, cut)
        return Answer(text, shown, reasoning, waiting, calls, finish_reason, self._figures())

    def _read_calls(self, finish_reason: str | None) -> tuple[tuple[ToolCall, ...], tuple[ToolCall, ...]]:
        """The calls, and those that stay text: all where one was cut or is none, since no server takes such a call back."""
        if finish_reason is None:
            return (), ()
        none = "" if finish_reason == "length" else "{}"  # what has not begun is no empty object
        found = self._calls.items()
        calls = tuple(
            ToolCall(c["id"] or f"call{n:05}", c["name"], _joined(c["arguments"], True) or none) for n, c in found
        )
        return (calls, ()) if all(call.name and call.is_whole for call in calls) else ((), calls)

    def _figures(self) -> Usage:
        details = self._usage.get("prompt_tokens_details") or {}
        tokens = self._usage.get("completion_tokens", self._pieces)
        decoding = self._last - (self._first or self._last)
        return Usage(
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            answer_tokens=tokens,
            first_token_s=None if self._first is None else self._first - self._start,
            tokens_a_second=(tokens - 1) / decoding if decoding > 0 and tokens > 1 else None,
        )


def _joined(text: str, finished: bool) -> str:
    """The text as Unicode: servers that count in UTF-16 send halves of a pair apart, of which one alone is no character."""
    if not finished and "\ud800" <= text[-1:] <= "\udbff":
        text = text[:-1]
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The data of a stream of server-sent events."""
    while line := response.readline(_MAX_LINE):
        field, _, value = line.strip().partition(b":")
        if field != b"data":
            continue
        if value.strip() == b"[DONE]":
            return
        try:
            event = json.loads(value)
        except ValueError as error:
            raise ServerError(f"The server sent what is no JSON: {error}.") from error
        if isinstance(event, dict):
            yield event


def _form(form: Any) -> dict[str, Any]:
    if form.json is not None:
        schema = {"name": "answer", "schema": json.loads(form.json), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    name = "regex" if form.regex is not None else "grammar"
    return {"structured_outputs": {name: getattr(form, name)}}


def _base(url: str) -> SplitResult:
    url.encode()  # what is no text is told as such
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host = (parts.hostname or "").encode("idna")
        valid = parts.scheme in ("http", "https") and host and (parts.port is None or parts.port > 0)
        valid = valid and url.isprintable() and " " not in url
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"The address is {url!r}; it must be a server's URL such as http://localhost:8000.")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return parts._replace(path=path or "/v1", query="", fragment="")


def _limit(model: Mapping[str, Any]) -> int | None:
    """Tokens of context, as vLLM or llama.cpp name them."""
    found = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx_train")
    return found if isinstance(found, int) and found > 0 else None


def _is_too_long(status: int, text: str) -> bool:
    """Whether a refusal is of a prompt that does not fit, for which servers have one status but many words."""
    return status == 413 or (status in (400, 422) and any(word in text.lower() for word in ("context", "too long")))


def _explained(text: str) -> str:
    with suppress(ValueError, AttributeError):
        return _reason(json.loads(text))
    return " ".join(text.split())[:300].rstrip(".") or "no reason given"


def _reason(event: Mapping[str, Any]) -> str:
    error = event.get("error", event)
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return str(message).rstrip(".")


def _said(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__).rstrip(".")
