"""The figures of /metrics: the same for whole and streamed answers, and each sequence ends once."""

from __future__ import annotations

import gc
import json
import socket
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.runtime.request import Request

ASK = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
LONG = {**ASK, "max_tokens": 8000}
PER_SEQUENCE = ("request_generation_tokens", "request_decode_time_seconds", "e2e_request_latency_seconds")
PER_REQUEST = (
    "time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds", "request_prompt_tokens",
    "request_max_num_generation_tokens",
)  # fmt: skip


class Figures:
    """Counts and sums of a server, by name, since this was made."""

    def __init__(self, running):
        self.running = running
        self.before = {}
        self.before = self.now()

    def now(self):
        with self.running.http as http:
            text = http.get("/metrics").text
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    name = sample.name.removeprefix("vllm:") + sample.labels.get("finished_reason", "")
                    found[name] = sample.value - self.before.get(name, 0)
        return found

    def when(self, name, value):
        """All of them, once this one is so great."""
        self.running.wait_until(lambda: self.now().get(name, 0) >= value)
        return self.now()


def ended(figures):
    return {name.removeprefix("request_success_total"): n for name, n in figures.items() if "success" in name and n}


def sent(running, body):
    """A connection on which a request has been sent."""
    connection = socket.create_connection((urlsplit(running.url).hostname, urlsplit(running.url).port))
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + text)
    return connection


@pytest.fixture(scope="module")
def narrow(start):
    """A server with one place, and room for answers that take a while."""
    return start(max_num_seqs=1, max_model_len=8192, kv_cache_tokens=16384)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_whole_answers_count_as_streamed_ones_do(running, stream, n):
    figures = Figures(running)
    with running.http as http:
        assert http.post("/v1/completions", json={**ASK, "n": n, "stream": stream}).status_code == 200
    found = figures.when("request_success_totallength", n)
    assert ended(found) == {"length": n}
    assert (found["prompt_tokens_total"], found["generation_tokens_total"]) == (3, 20 * n)
    assert found["inter_token_latency_seconds_count"] == 19 * n
    assert found["request_time_per_output_token_seconds_count"] == n
    assert {name: found[f"{name}_count"] for name in PER_SEQUENCE} == dict.fromkeys(PER_SEQUENCE, n)
    assert {name: found[f"{name}_count"] for name in PER_REQUEST} == dict.fromkeys(PER_REQUEST, 1)
    assert found["request_generation_tokens_sum"] == 20 * n and found["request_max_num_generation_tokens_sum"] == 20
    parts = ("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum")
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(sum(found[name] for name in parts))


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_count_when_they_are_made_and_clients_that_leave_are_aborts(narrow, stream):
    figures = Figures(narrow)
    with sent(narrow, {**LONG, "stream": stream}):
        running = figures.when("generation_tokens_total", 5)
        assert ended(running) == {} and running["prompt_tokens_total"] == 3
    found = figures.when("request_success_totalabort", 1)
    assert ended(found) == {"abort": 1}
    assert 5 <= found["request_generation_tokens_sum"] == found["generation_tokens_total"] < 8000
    with narrow.http as http:
        [model] = http.get("/stats").json()["models"]
    assert model["generated_tokens"] == figures.now()["generation_tokens_total"] + figures.before.get(
        "generation_tokens_total", 0
    )


def test_who_leaves_before_the_first_token_is_an_abort(narrow):
    figures = Figures(narrow)
    with sent(narrow, LONG):
        figures.when("generation_tokens_total", 5)
        with sent(narrow, LONG):
            figures.when("num_requests_waiting", 1)
        assert ended(figures.when("request_success_totalabort", 1)) == {"abort": 1}
    found = figures.when("request_success_totalabort", 2)
    assert ended(found) == {"abort": 2}
    assert (found["time_to_first_token_seconds_count"], found["request_generation_tokens_count"]) == (1, 2)


def test_rates_begin_at_nought(start):
    """A counter that appears with its first increment hides it from a rate."""
    found = Figures(start()).now()
    assert {name: found.get(f"request_success_total{name}") for name in ("stop", "length", "abort", "error")} == {
        "stop": 0, "length": 0, "abort": 0, "error": 0,
    }  # fmt: skip
    assert found["generation_tokens_total"] == found["inter_token_latency_seconds_count"] == 0


def test_a_request_that_has_ended_is_let_go_at_once(running):
    """With its tokens and its text, and not when garbage is looked for, which the command line has done rarely."""
    gc.collect()
    gc.disable()
    try:
        before = len(requests())
        for stream in (False, True):
            for _ in range(5):
                body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "stream": stream}
                with running.http as http:
                    assert http.post("/v1/completions", json=body).status_code == 200
        running.wait_until(lambda: len(requests()) <= before)
    finally:
        gc.enable()


def requests() -> list[Request]:
    return [found for found in gc.get_objects() if type(found) is Request]
