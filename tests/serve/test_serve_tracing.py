"""Spans by OpenTelemetry's conventions for generative AI, of a real server."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.errors import UsageError
from engine.serve.tracing import CONTENT, Tracing, load_tracing

SECRET = "a secret of mine"
ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 5,
    "temperature": 0.5,
    "seed": 3,
}


@pytest.fixture(scope="module")
def collected():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(start, collected):
    return start(tracing=Tracing(provider(collected)), options={"max_queue": 1}, max_num_seqs=4)


def provider(exporter):
    found = TracerProvider()
    found.add_span_processor(SimpleSpanProcessor(exporter))
    return found


def asked(traced, collected, path, body, headers=None):
    """The answer and the span of a request."""
    collected.clear()
    with traced.http as http:
        answer = http.post(path, json=body, headers=headers)
    traced.wait_until(lambda: len(collected.get_finished_spans()) == 1)
    return answer, collected.get_finished_spans()[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_a_span(traced, collected, stream):
    answer, span = asked(
        traced, collected, "/v1/chat/completions", ASK | {"stream": stream, "stop": ["\n\n\n"], "n": 2}
    )
    assert (span.name, span.kind, span.parent) == ("chat tiny", SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    found = dict(span.attributes)
    seconds = (span.end_time - span.start_time) / 1e9
    first = found.pop(f"gen_ai.{'response.time_to_first_chunk' if stream else 'latency.time_to_first_token'}")
    assert 0 <= found.pop("gen_ai.latency.time_in_queue") <= first <= seconds
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "engine",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": found["gen_ai.request.top_k"],
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("\n\n\n",),
        "gen_ai.request.stream": stream,
        "gen_ai.usage.input_tokens": found["gen_ai.usage.input_tokens"],
        "gen_ai.usage.cache_read.input_tokens": found["gen_ai.usage.cache_read.input_tokens"],
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.response.id": f"chatcmpl-{answer.headers['x-request-id']}",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }
    if not stream:
        usage = answer.json()["usage"]
        assert answer.json()["id"] == found["gen_ai.response.id"]
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert SECRET not in span.to_json() and not span.events


def test_the_callers_trace_goes_on(traced, collected):
    rng = np.random.default_rng()
    trace, parent = rng.bytes(16).hex(), rng.bytes(8).hex()
    _, span = asked(traced, collected, "/v1/chat/completions", ASK, {"traceparent": f"00-{trace}-{parent}-01"})
    assert f"{span.context.trace_id:032x}" == trace and f"{span.parent.span_id:016x}" == parent
    traced.wait_until_logged(trace_id=trace)
    _, span = asked(traced, collected, "/v1/chat/completions", ASK, {"traceparent": "nonsense"})
    assert span.parent is None
    collected.clear()
    with traced.http as http:
        http.post("/v1/chat/completions", json=ASK, headers={"traceparent": f"00-{trace}-{parent}-00"})
    assert collected.get_finished_spans() == (), "the caller has decided that this trace is not recorded"


# greedy: what is drawn without a seed may end before its third token
THREE = {"num_predict": 3, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": [SECRET, "x"], "max_tokens": 3, "temperature": 0}, "text_completion"),
        (
            "/v1/messages",
            {"model": "tiny", "messages": ASK["messages"], "max_tokens": 3, "temperature": 0},
            "chat",
        ),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 3, "temperature": 0}, "chat"),
        ("/api/chat", {"model": "tiny", "messages": ASK["messages"], "options": THREE}, "chat"),
        ("/api/generate", {"model": "tiny", "prompt": SECRET, "options": THREE}, "text_completion"),
        ("/v1/embeddings", {"input": [SECRET, "x"]}, "embeddings"),
        ("/api/embed", {"model": "tiny", "input": SECRET}, "embeddings"),
    ],
)
def test_all_protocols_have_spans(traced, collected, path, body, operation):
    answer, span = asked(traced, collected, path, body)
    assert answer.status_code == 200
    assert span.name == f"{operation} tiny" and span.attributes["gen_ai.usage.input_tokens"] > 3
    outputs = span.attributes.get("gen_ai.usage.output_tokens")
    assert (
        outputs == {"embeddings": None, "text_completion": 6 if path == "/v1/completions" else 3, "chat": 3}[operation]
    )
    assert SECRET not in span.to_json()


def test_faults_are_told_apart(traced, collected):
    for body, status in ((ASK | {"top_p": 7}, 400), (ASK | {"model": "nothing"}, 404), (b"", 400)):
        answer, span = asked(traced, collected, "/v1/chat/completions", body if body else None)
        assert answer.status_code == status and span.name == "chat"
        assert span.attributes["error.type"] == str(status) == str(span.attributes["http.response.status_code"])
        assert span.status.status_code is StatusCode.UNSET  # no fault of the server
    collected.clear()
    with traced.http as http, http.stream("POST", "/v1/chat/completions", json=ASK | LONG) as response:
        next(response.iter_lines())
    traced.wait_until(lambda: len(collected.get_finished_spans()) == 1)
    [span] = collected.get_finished_spans()
    assert span.attributes["error.type"] == "client_gone" and span.attributes["gen_ai.usage.output_tokens"] >= 1
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)
    traced.wait_until_free()
    collected.clear()
    with traced.http as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=ASK | LONG | {"stream": False, "max_tokens": 990}, timeout=0.05)
    traced.wait_until(lambda: len(collected.get_finished_spans()) == 1)
    [span] = collected.get_finished_spans()
    assert span.attributes["error.type"] == "client_gone" and span.attributes["http.response.status_code"] == 499
    assert span.status.status_code is StatusCode.UNSET  # no fault of the server
    traced.wait_until_free()


LONG = {"max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}


def test_other_paths_have_none(traced, collected):
    collected.clear()
    with traced.http as http:
        for path in ("/health", "/metrics", "/v1/models", "/v1/chat/completions"):
            http.get(path)
        http.post("/tokenize", json={"prompt": "x"})
    assert collected.get_finished_spans() == ()


def test_prompts_and_answers_only_where_they_are_asked_for(start):
    exporter = InMemorySpanExporter()
    running = start(tracing=Tracing(provider(exporter), content=True))
    answer, span = asked(running, exporter, "/v1/chat/completions", ASK)
    said = [{"role": "user", "parts": [{"type": "text", "content": SECRET}]}]
    assert json.loads(span.attributes["gen_ai.input.messages"]) == said
    [found] = json.loads(span.attributes["gen_ai.output.messages"])
    choice = answer.json()["choices"][0]
    assert found["parts"] == [{"type": "text", "content": choice["message"]["content"]}]
    assert (found["role"], found["finish_reason"]) == ("assistant", choice["finish_reason"])


@pytest.fixture
def collector():
    """A collector that speaks OTLP over HTTP, and what it got: paths and requests."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
            got.append((self.path, ExportTraceServiceRequest.FromString(data)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_go_where_the_environment_says(start, collector, monkeypatch):
    url, got = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    notes = []
    tracing = load_tracing(notes.append)
    running = start(tracing=tracing)
    with running.http as http:
        assert http.post("/v1/chat/completions", json=ASK).status_code == 200
    running.wait_until(lambda: "trace_id" in (running.logs or [{}])[-1])
    tracing.close()
    [(path, sent)] = got
    [spans] = sent.resource_spans
    named = {pair.key: pair.value.string_value for pair in spans.resource.attributes}
    assert path == "/v1/traces" and named["service.name"] == "engine" and not notes
    [span] = spans.scope_spans[0].spans
    assert span.name == "chat tiny" and span.trace_id.hex() == running.logs[-1]["trace_id"]
    assert SECRET.encode() not in sent.SerializeToString()


@pytest.mark.parametrize(
    ("environment", "there"),
    [
        ({}, False),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({CONTENT: "true"}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
    ],
)
def test_what_the_environment_asks_for(environment, there):
    tracing = load_tracing(pytest.fail, environment)
    assert (tracing is not None) == there
    if tracing:
        tracing.close()


@pytest.mark.parametrize(
    "environment",
    [{"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}],
)
def test_exporters_that_are_not_there(environment):
    with pytest.raises(UsageError, match="it must be"):
        load_tracing(pytest.fail, environment)


def test_nothing_is_imported_unless_it_is_asked_for():
    """And where it is asked for but not installed, the server says so and goes on."""
    code = """
import sys
import engine.serve.run
from engine.serve.tracing import load_tracing
assert load_tracing(print, {}) is None
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
sys.modules["opentelemetry.sdk"] = None
assert load_tracing(print, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) is None
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "engine[otel]" in ran.stdout and ran.stdout.count("\n") == 1
