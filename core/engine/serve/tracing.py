"""OpenTelemetry: a span for each request to a model, by the names of its conventions for generative AI. Nothing of it is
imported unless the environment asks for traces."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from engine import __version__
from engine.errors import UsageError
from engine.runtime.outputs import RequestOutput
from engine.sampling import SamplingParams

from .admission import Place

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_OPERATIONS = {
    "/v1/chat/completions": ("chat", "chatcmpl-"),
    "/v1/completions": ("text_completion", "cmpl-"),
    "/v1/messages": ("chat", "msg_"),
    "/v1/responses": ("chat", "resp_"),
    "/api/chat": ("chat", ""),
    "/api/generate": ("text_completion", ""),
    "/v1/embeddings": ("embeddings", ""),
    "/api/embed": ("embeddings", ""),
    "/api/embeddings": ("embeddings", ""),
    "/v1/rerank": ("rerank", "rerank-"),
    "/v2/rerank": ("rerank", "rerank-"),
}
"""What requests to a path ask for, and how the ids of their answers begin, where they have some."""
_VECTORS = ("embeddings", "rerank")
"""What generates no text."""
_ASKED = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "n": "choice.count",
}
current: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""That of the request which this task answers."""


class Tracing:
    """Makes spans by a provider. ``content``: they have prompts and answers, too."""

    def __init__(self, provider: TracerProvider, content: bool = False) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("engine.serve", __version__)
        self._content = content

    def begin(self, method: str, path: str, headers: Mapping[str, str], request_id: str) -> Trace | None:
        """The trace of a request, a part of the caller's where its headers name one; None for a path that asks no model."""
        if method != "POST" or path not in _OPERATIONS:
            return None
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind

        operation, prefix = _OPERATIONS[path]
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "engine"}
        attributes |= {"http.request.method": method, "url.path": path}
        span = self._tracer.start_span(operation, propagate.extract(headers), SpanKind.SERVER, attributes)
        return Trace(span, operation, prefix and prefix + request_id, self._content)

    def close(self) -> None:
        """Sends what has not been sent."""
        self._provider.shutdown()


class Trace:
    """The span of one request."""

    def __init__(self, span: Span, operation: str, answer_id: str, content: bool) -> None:
        self._span, self._operation, self._answer_id, self._content = span, operation, answer_id, content
        self._start = time.monotonic()
        self._last: dict[int, RequestOutput] = {}
        self._streams = False
        self._place: Place | None = None

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def asked(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """What the request says, if that is to be told."""
        if self._content:
            self._span.set_attribute("gen_ai.input.messages", json.dumps([_message(m) for m in messages]))

    def begun(self, model: str, params: SamplingParams, streams: bool, place: Place) -> None:
        """The request is in order, and waits for its turn."""
        self._streams, self._place = streams, place
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attributes({"gen_ai.request.model": model, "gen_ai.response.model": model})
        if self._operation not in _VECTORS:
            found = {f"gen_ai.request.{name}": getattr(params, field) for field, name in _ASKED.items()}
            self._span.set_attributes({name: value for name, value in found.items() if value is not None})
            self._span.set_attribute("gen_ai.request.stream", streams)
            if params.stop:
                self._span.set_attribute("gen_ai.request.stop_sequences", list(params.stop))

    def take(self, index: int, output: RequestOutput) -> None:
        self._last[index] = output

    def failed(self, kind: str) -> None:
        """The request had no answer, or not all of it; ``kind`` is a status, or what has happened. Only what is the server's
        fault is an error of the span."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", kind)
        if kind.startswith("5"):
            self._span.set_status(StatusCode.ERROR)

    def close(self, status: int | None, gone: bool) -> None:
        """The end of the request, answered with ``status``, or whose client has ``gone``."""
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
            if status >= 400:
                self.failed(str(status))
        if gone:
            self.failed("client_gone")
        if self._last:
            self._span.set_attributes(self._figures())
        self._span.end()

    def _figures(self) -> dict[str, Any]:
        outputs = [self._last[index] for index in sorted(self._last)]
        completions = [completion for output in outputs for completion in output.outputs]
        found: dict[str, Any] = {
            "gen_ai.usage.input_tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "gen_ai.usage.cache_read.input_tokens": sum(output.num_cached_tokens for output in outputs),
        }
        if self._place is not None and self._place.begun is not None:
            found["gen_ai.latency.time_in_queue"] = max(self._place.begun - self._start, 0.0)
        if self._operation in _VECTORS:
            return found
        found["gen_ai.usage.output_tokens"] = sum(output.num_generated_tokens for output in outputs)
        found["gen_ai.response.finish_reasons"] = [c.finish_reason or "error" for c in completions]
        first = [o.metrics.first_token - self._start for o in outputs if o.metrics.first_token is not None]
        if first:
            name = "response.time_to_first_chunk" if self._streams else "latency.time_to_first_token"
            found[f"gen_ai.{name}"] = min(first)
        if self._answer_id:
            found["gen_ai.response.id"] = self._answer_id
        if self._content:
            said = [
                {**_message({"role": "assistant", "content": c.text}), "finish_reason": c.finish_reason}
                for c in completions
            ]
            found["gen_ai.output.messages"] = json.dumps(said)
        return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """In the form of the conventions."""
    content = message.get("content") or ""
    parts: list[dict[str, Any]] = [{"type": "text", "content": content}] if content else []
    if message["role"] == "tool":
        parts = [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}]
    parts += [{"type": "tool_call", "id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "parts": parts}


def load_tracing(note: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """As OpenTelemetry's variables say: traces are sent where they name an endpoint or an exporter. ``note`` tells a person
    why they are not sent although that is asked for. UsageError for an exporter or a protocol that is not there."""
    exporter = environment.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(environment.get, _ENDPOINTS)) else "none")
    if exporter == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if exporter not in ("otlp", "console"):
        raise UsageError(f"OTEL_TRACES_EXPORTER is {exporter!r}; it must be otlp, console or none.")
    protocol = next(filter(None, map(environment.get, _PROTOCOLS)), _HTTP)
    if exporter == "otlp" and protocol != _HTTP:
        raise UsageError(f"{_PROTOCOLS[1]} is {protocol!r}; it must be {_HTTP}.")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ImportError:
        note("No traces are sent: OpenTelemetry is not installed; install the extra otel: pip install 'engine[otel]'.")
        return None
    known = {"service.version": __version__}
    if not (environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")):
        known["service.name"] = "engine"
    provider = TracerProvider(resource=Resource.create(known))
    sender = OTLPSpanExporter() if exporter == "otlp" else ConsoleSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(sender))
    return Tracing(provider, environment.get(CONTENT, "").lower() == "true")
