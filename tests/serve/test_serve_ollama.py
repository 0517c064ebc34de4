"""Ollama's protocol: objects, one a line."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import numpy as np
import pytest
import tiny_models

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
OPTIONS = {"seed": 5, "num_predict": 15, "temperature": 0.9, "top_k": 40, "repeat_penalty": 1.1}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def lines(http, path, body):
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_chats_stream_as_they_are_whole(running):
    body = {"model": "tiny", "messages": HELLO, "options": OPTIONS}
    with running.http as http:
        whole = http.post("/api/chat", json=body | {"stream": False}).json()
        pieces = lines(http, "/api/chat", body)
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for last in (whole, pieces[-1]):
        assert (last["done_reason"], last["eval_count"]) == ("length", 15)
        assert last["prompt_eval_count"] > 10 and last["eval_duration"] > 0
    over_openai = running.openai.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=15,
        seed=5,
        temperature=0.9,
        extra_body={"top_k": 40, "repetition_penalty": 1.1},
    )
    assert over_openai.choices[0].message.content == whole["message"]["content"]


def test_generate_and_forms(running):
    with running.http as http:
        body = {"model": "tiny:latest", "prompt": "Hello?", "system": "Be brief.", "options": OPTIONS}
        whole = http.post("/api/generate", json=body | {"stream": False}).json()
        assert "".join(piece["response"] for piece in lines(http, "/api/generate", body)) == whole["response"]
        form = {"type": "integer", "minimum": 10, "maximum": 99}
        number = http.post("/api/generate", json=body | {"stream": False, "format": form}).json()
        assert 10 <= json.loads(number["response"]) <= 99


def test_a_raw_prompt_is_given_as_it_is(start, tmp_path):
    tiny_models.write_llama(tmp_path, np.random.default_rng(5))  # without a chat template
    running = start(model=tmp_path, max_model_len=256)
    body = {"model": "tiny", "prompt": "Hello? <think>", "raw": True, "options": OPTIONS, "think": False}
    with running.http as http:
        whole = http.post("/api/generate", json=body | {"stream": False}).json()
        pieces = lines(http, "/api/generate", body)
        told = [
            http.post("/api/generate", json=body | wrong).json()["error"]
            for wrong in ({"raw": False}, {"system": "x"}, {"think": "low"}, {"prompt": "x" * 2000, "options": {}})
        ]
    same = {"top_k": 40, "repetition_penalty": 1.1}
    plain = running.openai.completions.create(
        model="tiny", prompt="Hello? <think>", max_tokens=15, seed=5, temperature=0.9, extra_body=same
    )
    assert whole["response"] == "".join(piece["response"] for piece in pieces) == plain.choices[0].text
    assert plain.usage.prompt_tokens == whole["prompt_eval_count"] == pieces[-1]["prompt_eval_count"]
    words = ("with raw", "without system", "think", "context")
    assert all(word in sentence for word, sentence in zip(words, told, strict=True))


def test_tools_and_thoughts(start, tmp_path):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tiny_models.TEMPLATE.replace(
        "<assistant>", "<assistant><think>"
    )
    running = start(model=tiny_models.write_talker(tmp_path, template))
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    called["tool_calls"].append({"id": "call_1", "type": "function"} | called["tool_calls"][0])  # as in LangChain.js
    messages = [*HELLO, called, {"role": "tool", "tool_name": "weather", "content": "Sun."}]
    with running.http as http:
        assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"][2:] == ["tools", "thinking"]
        begun = [*HELLO, {"role": "assistant", "content": "So"}]
        goes_on = {"model": "tiny", "messages": begun, "think": True, "stream": False, "options": OPTIONS}
        answer = http.post("/api/chat", json=goes_on).json()["message"]
        assert len(answer["content"]) == 15 and "thinking" not in answer  # what is there is no thought
        body = {"model": "tiny", "messages": messages, "tools": [TOOL], "options": OPTIONS}
        whole = http.post("/api/chat", json=body | {"stream": False}).json()["message"]
        pieces = lines(http, "/api/chat", body)
    assert whole["content"] == "" and len(whole["thinking"]) == 15
    assert "".join(piece["message"].get("thinking", "") for piece in pieces) == whole["thinking"]


def test_nulls_are_what_is_not_there(running):
    call = {"id": None, "function": {"name": "weather", "arguments": {"day": None}}}
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "So?"}]
    few = {"num_predict": 3, "seed": 5, "stop": None}
    with running.http as http:
        chat = {"model": "tiny", "messages": turns, "options": few, "tools": None, "format": None}
        assert lines(http, "/api/chat", chat | {"stream": None})[-1]["done"]
        plain = [turn | ({"content": ""} if turn["content"] is None else {}) for turn in turns]
        one, two = (http.post("/api/chat", json=chat | {"stream": False, "messages": m}).json() for m in (turns, plain))
        assert one["message"] == two["message"] and one["prompt_eval_count"] == two["prompt_eval_count"]
        loaded = http.post("/api/generate", json={"model": "tiny", "prompt": None, "stream": False}).json()
        assert loaded["done_reason"] == "load"
        assert http.post("/api/show", json={"model": None, "name": "tiny"}).status_code == 200
        assert "model is missing" in http.post("/api/chat", json={"model": None, "messages": HELLO}).json()["error"]


def test_models_and_refusals(running):
    with running.http as http:
        [listed] = http.get("/api/tags").json()["models"]
        assert listed["name"] == "tiny" and len(listed["digest"]) == 64
        shown = http.post("/api/show", json={"model": "tiny"}).json()
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["capabilities"] == ["completion", "embedding"]
        assert http.get("/api/version").json()["version"]
        thoughtless = http.post("/api/chat", json={"model": "tiny", "messages": HELLO, "think": True})
        assert thoughtless.status_code == 400 and "knows no thinking" in thoughtless.json()["error"]
        assert http.post("/api/chat", json={"model": "tiny", "messages": HELLO, "think": False}).status_code == 200
        refused = http.post("/api/chat", json={"model": "tiny", "messages": HELLO, "options": {"mirostat": 1}})
        assert refused.status_code == 400 and "options.mirostat" in refused.json()["error"]
        assert http.post("/api/chat", json={"model": "other", "messages": HELLO}).status_code == 404


@pytest.mark.parametrize("field", ["images", "context", "suffix", "template"])
def test_fields_that_are_not_there_are_named(running, field):
    with running.http as http:
        answer = http.post("/api/generate", json={"model": "tiny", "prompt": "x", field: "y"})
    assert answer.status_code == 400 and field in answer.json()["error"]


def test_models_stay_loaded_as_long_as_keep_alive_says(start):
    """As `ollama stop` and its programs have it; another protocol's requests leave it as it is."""
    running = start(options={"idle_unload": 1000.0})
    [model] = running.models.by_name.values()
    ask = {"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 2}}
    with running.http as http:
        for given, seconds in (
            ("5m", 300),
            ("1h1.5m", 3690),
            (90, 90),
            (0.5, 0.5),
            ("-1s", math.inf),
            (-1, math.inf),
            (10**400, math.inf),
        ):
            assert http.post("/api/generate", json=ask | {"keep_alive": given}).status_code == 200
            assert model.keep_s == seconds
        running.openai.completions.create(model="tiny", prompt="x", max_tokens=2)
        http.post("/api/generate", json=ask)
        http.post("/api/generate", json={"model": "tiny"})
        assert model.keep_s == math.inf
        for wrong in ("5", "m", "5 m", "-1", "", True, [1]):
            refused = http.post("/api/generate", json=ask | {"keep_alive": wrong})
            assert refused.status_code == 400 and "keep_alive is wrong: i" in refused.json()["error"]
        for path, nothing in (("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})):
            assert http.post("/api/generate", json=ask).status_code == 200 and model.loaded
            for _ in range(2):
                stopped = http.post(path, json={"model": "tiny:latest", "keep_alive": "0s"} | nothing).json()
                assert stopped["done"] and stopped["done_reason"] == "unload" and not model.loaded
        assert http.get("/api/ps").json()["models"] == []
        assert http.post("/api/generate", json={"model": "other", "keep_alive": 0}).status_code == 404
        for path, body in (("/api/generate", ask), ("/api/embed", {"model": "tiny", "input": "x"})):
            assert http.post(path, json=body).status_code == 200 and model.keep_s == 1000
            assert http.post(path, json=body | {"keep_alive": 0}).status_code == 200
            running.wait_until(lambda: not model.loaded)


def test_what_ollamas_own_program_asks_of_a_model(running):
    nothing = {"system": "", "template": "", "verbose": False, "options": None}
    with running.http as http:
        plain = http.post("/api/show", json={"model": "tiny"}).json()
        for asked in ({"model": "tiny", "name": "tiny"}, {"model": "tiny", "name": ""}, {"model": "", "name": "tiny"}):
            for options in (None, {}):
                assert http.post("/api/show", json=asked | nothing | {"options": options}).json() == plain
        assert datetime.fromisoformat(plain["modified_at"]) <= datetime.now(UTC)
        for field, value in (("system", "x"), ("template", "x"), ("options", {"num_ctx": 5})):
            refused = http.post("/api/show", json={"model": "tiny", field: value})
            assert refused.status_code == 400 and field in refused.json()["error"]
        assert "model is missing" in http.post("/api/show", json={}).json()["error"]


def test_until_when_a_model_is_in_memory(start):
    running = start()
    with running.http as http:
        for keep_alive, least, most in ((600, 590, 600), (-1, 20 * 365 * 86400, math.inf)):
            http.post("/api/generate", json={"model": "tiny", "keep_alive": keep_alive})
            [model] = http.get("/api/ps").json()["models"]
            left = datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)
            assert least < left.total_seconds() <= most
            assert model["context_length"] == 1024


def test_a_model_that_is_to_be_unloaded_ends_its_requests_first(start):
    running = start(max_model_len=8192, kv_cache_tokens=8192)
    [model] = running.models.by_name.values()
    with running.http as http:
        long = {"model": "tiny", "prompt": "x", "options": {"num_predict": 2000, "temperature": 0}}
        with http.stream("POST", "/api/generate", json=long) as response:
            pieces = response.iter_lines()
            next(pieces)
            stopped = http.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
            assert stopped.json()["done_reason"] == "unload" and model.loaded
            *_, last = pieces
    assert json.loads(last)["eval_count"] == 2000
    running.wait_until(lambda: not model.loaded)
