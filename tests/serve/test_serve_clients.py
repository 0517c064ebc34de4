"""What programs send beside what they want: it is taken where it changes nothing, and a refusal names the field."""

from __future__ import annotations

import time

import pytest

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 0, "seed": 1}
TAKEN = [
    {"metadata": {"team": "a"}},
    {"store": False},
    {"service_tier": "auto"},
    {"modalities": ["text"]},
    {"safety_identifier": "x", "prompt_cache_key": "y", "user": "z"},
]
REFUSED = [
    ({"store": True}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities.1"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": "y"}]}]},
        "messages.0.content.0.image_url",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"stop": 5}, "stop"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
]


@pytest.mark.parametrize("fields", TAKEN, ids=lambda fields: next(iter(fields)))
def test_what_changes_nothing_is_taken(running, fields):
    with running.http as http:
        plain, answer = (http.post("/v1/chat/completions", json=ASK | more) for more in ({}, fields))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain.json()["choices"]


def test_streams_without_obfuscation(running):
    options = {"include_usage": True, "include_obfuscation": False}
    with running.http as http:
        answer = http.post("/v1/chat/completions", json=ASK | {"stream": True, "stream_options": options})
    assert answer.status_code == 200 and '"completion_tokens":3' in answer.text


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_refusal_names_the_field(running, fields, param):
    with running.http as http:
        answer = http.post("/v1/chat/completions", json=ASK | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and f"The field {param} is " in error["message"]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/api/version", "/metrics"])
def test_head_is_get_without_a_body(running, path):
    """Load balancers ask so, and Ollama's client whether anybody is there."""
    with running.http as http:
        asked, got = http.head(path), http.get(path)
        assert (asked.status_code, asked.content) == (200, b"") and got.content
        assert asked.headers["content-type"] == got.headers["content-type"]
        assert http.head("/v1/chat/completions").status_code == 405
        assert http.head("/nothing").status_code == 404


def test_what_is_in_memory_by_ollamas_protocol(running):
    with running.http as http:
        [model] = http.get("/api/ps").json()["models"]
    assert model["name"] == "tiny" and model["size_vram"] > model["size"] > 0


def test_an_answer_on_an_open_connection_waits_for_no_receipt(running):
    """Head and body of an answer are two writes: Nagle's algorithm holds the second until the first's receipt, 40 ms."""
    took = []
    with running.http as client:
        for _ in range(20):
            begun = time.perf_counter()
            client.post("/tokenize", json={"prompt": "x"}).raise_for_status()
            took.append(time.perf_counter() - begun)
    assert min(took[5:]) < 0.03, took
