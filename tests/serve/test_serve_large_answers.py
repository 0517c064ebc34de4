"""Answers of many numbers: they are made beside the event loop, and bounded."""

from __future__ import annotations

import asyncio
import importlib
import json

import pytest

from engine.serve.respond import _json

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
ASKED = {
    "completions.text_logprobs": ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True, "logprobs": 3}),
    "chat_completions.chat_logprobs": ("/v1/chat/completions", CHAT),
    "tokens.token_text": ("/tokenize", {"prompt": "xyz", "return_token_strs": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_made_beside_the_event_loop(running, monkeypatch, name):
    module, function = name.split(".")
    module = importlib.import_module(f"engine.serve.{module}")
    make, beside = getattr(module, function), []

    def made(*given):
        try:
            asyncio.get_running_loop()
            beside.append(False)
        except RuntimeError:
            beside.append(True)
        return make(*given)

    monkeypatch.setattr(module, function, made)
    path, body = ASKED[name]
    with running.http as http:
        answer = http.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 200 and beside and all(beside)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[5] * 500] * 300, "max_tokens": 0, "echo": True, "logprobs": 32},
        {"prompt": [[5]] * 200, "max_tokens": 1000, "logprobs": 32, "stream": True},
        {"prompt": [[5]] * 2, "n": 64, "max_tokens": 1000, "logprobs": 32},
    ],
)
def test_more_logprobs_than_an_answer_may_have(running, body):
    with running.http as http:
        refused = http.post("/v1/completions", json={"model": "tiny", **body})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
        assert http.post(
            "/v1/completions", json={"model": "tiny", **body, "prompt": body["prompt"][:1], "max_tokens": 1}
        )


def test_json_in_parts_is_json():
    values = [1.5, -2, None, True, 'a\u2200"\n', "", [], {}, {"a": {"b": [1, {"c": [[2]]}]}}, [None, {"x": [{}, []]}]]
    values += [list(range(2500)), [["a"] * 1001, []], [[[[[[[1, {"d": 2}]]]]]]]]
    for value in (*values, values, {"all": values}):
        assert _json(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
