"""Every object that the server sends, by the types of the clients: nothing that they require is missing, and no word is other."""

from __future__ import annotations

import json
from functools import cache

import anthropic
import openai
import pytest
import tiny_models
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

HELLO = [{"role": "user", "content": "Hello?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
FORM = {"type": "json_schema", "name": "n", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}
CHATS = {
    "text": {},
    "scored": {"logprobs": True, "top_logprobs": 2, "n": 2},
    "call": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 300},
}
COMPLETIONS = {"text": {}, "scored": {"logprobs": 2, "n": 2}}
RESPONSES = {
    "text": {"instructions": "Be brief.", "metadata": {"a": "b"}},
    "form": {"text": {"format": FORM}},
    "unnamed form": {"text": {"format": {"type": "json_schema", "schema": FORM["schema"]}}},
    "call": {
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 300,
    },
    "bare tool": {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none"},
}
MESSAGES = {
    "text": {},
    "stop": {"stop_sequences": list("aeiou")},
    "call": {"tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "max_tokens": 300},
}


@pytest.fixture(scope="module", params=["plain", "thinks"])
def served(request, start, tmp_path_factory):
    """A server whose template shows tools; one's answers are thoughts alone, unless they are calls."""
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tiny_models.TEMPLATE
    if request.param == "thinks":
        template = template.replace("<assistant>", "<assistant><think>")
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp(request.param), template))


adapter = cache(TypeAdapter)


def whole(running, path, body, form):
    """An answer of this form."""
    with running.http as http:
        answer = http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return adapter(form).validate_json(answer.content, strict=True)


def streamed(running, path, body, form):
    """The events of a stream, each of this form, with their names where they have any."""
    found, name = [], None
    with running.http as http, http.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                assert name is None or name == event["type"]
                adapter(form).validate_json(line.removeprefix("data: "), strict=True)
                found.append(event)
    return found


@pytest.mark.parametrize("case", CHATS)
def test_chats(served, case):
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0, **CHATS[case]}
    whole(served, "/v1/chat/completions", body, ChatCompletion)
    chunks = streamed(served, "/v1/chat/completions", body, ChatCompletionChunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions(running, case):
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 0, **COMPLETIONS[case]}
    whole(running, "/v1/completions", body, Completion)
    for chunk in streamed(running, "/v1/completions", body, dict):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # the type is that of whole ones alone
        Completion.model_validate(chunk, strict=True)


@pytest.mark.parametrize("case", RESPONSES)
def test_responses(served, case):
    body = {"input": "Hello?", "max_output_tokens": 12, "temperature": 0, **RESPONSES[case]}
    answer = whole(served, "/v1/responses", body, Response)
    events = streamed(served, "/v1/responses", body, ResponseStreamEvent)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{answer.status}"
    items = {}
    for event in events[2:-1]:
        at = event["output_index"]
        if event["type"] == "response.output_item.added":
            assert at == len(items) and event["item"].get("status", "in_progress") == "in_progress"
            items[at] = event["item"]["id"]
        assert items[at] == event.get("item_id", event.get("item", {}).get("id"))
    assert [item["id"] for item in events[-1]["response"]["output"]] == list(items.values())
    assert len({json.dumps(e["response"]["id"]) for e in (*events[:2], events[-1])}) == 1


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(served, case):
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0, **MESSAGES[case]}
    answer = whole(served, "/v1/messages", body, Message)
    events = streamed(served, "/v1/messages", body, RawMessageStreamEvent)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * len(answer.content)
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    begun, ended = events[0]["message"], events[-2]
    assert begun["content"] == [] and begun["stop_reason"] is begun["stop_sequence"] is None
    assert ended["delta"] == {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
    assert ended["usage"]["output_tokens"] == answer.usage.output_tokens >= begun["usage"]["output_tokens"]
    del body["max_tokens"]
    body.pop("stop_sequences", None), body.pop("temperature")
    whole(served, "/v1/messages/count_tokens", body, MessageTokensCount)


def test_what_has_no_stream(running):
    whole(running, "/v1/embeddings", {"input": ["a", "b"]}, CreateEmbeddingResponse)
    with running.http as http:
        for model in (http.get("/v1/models").json()["data"][0], http.get("/v1/models/tiny").json()):
            Model.model_validate(model, strict=True)


def test_answers_have_the_ids_of_their_requests(running):
    """By the headers that the clients read."""
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        assert client.messages.create(model="tiny", max_tokens=1, messages=HELLO)._request_id
        with pytest.raises(anthropic.NotFoundError) as refused:
            client.messages.create(model="other", max_tokens=1, messages=HELLO)
        assert refused.value.request_id
    answer = running.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)
    assert answer._request_id
    with pytest.raises(openai.NotFoundError) as refused:
        running.openai.chat.completions.create(model="other", messages=HELLO)
    assert refused.value.request_id


def test_ollamas(served):
    ollama = pytest.importorskip("ollama", reason="needs Ollama's client")
    said = {"chat": {"messages": HELLO}, "generate": {"prompt": "Hello?"}, "embed": {"input": ["a", "b"]}}
    nothing = {"chat": {"messages": []}, "generate": {}}
    forms = {"chat": ollama.ChatResponse, "generate": ollama.GenerateResponse, "embed": ollama.EmbedResponse}

    def checked(name, form, answer):
        assert answer.status_code == 200, answer.text
        for line in answer.text.splitlines():
            adapter(form).validate_json(line, strict=True)
        return [json.loads(line) for line in answer.text.splitlines()]

    with served.http as http:
        for name, fields in said.items():
            asked = {"model": "tiny", **fields} | ({} if name == "embed" else {"options": {"num_predict": 12}})
            pieces = checked(name, forms[name], http.post(f"/api/{name}", json=asked))
            if name == "embed":
                continue
            [full] = checked(name, forms[name], http.post(f"/api/{name}", json=asked | {"stream": False}))
            assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            figures = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count"}
            for last in (pieces[-1], full):
                assert last.keys() >= figures | {"eval_duration"} and last["done_reason"] == "length"
                assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
            [loaded] = checked(name, forms[name], http.post(f"/api/{name}", json={"model": "tiny", **nothing[name]}))
            assert loaded["done_reason"] == "load"
        checked("tags", ollama.ListResponse, http.get("/api/tags"))
        checked("ps", ollama.ProcessResponse, http.get("/api/ps"))
        checked("show", ollama.ShowResponse, http.post("/api/show", json={"model": "tiny"}))
    client = ollama.Client(host=served.url)
    tools = [{"type": "function", "function": FUNCTION}]
    assert client.chat("tiny", HELLO, tools=tools, options={"num_predict": 3}).eval_count == 3
    with pytest.raises(ollama.ResponseError, match="There is no model 'other'"):
        client.chat("other", HELLO)
