"""Anthropic's own client against a real server."""

from __future__ import annotations

import json

import anthropic
import numpy as np
import pytest
import tiny_models

from engine.serve.errors import ApiError

TOOL = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
HELLO = [{"role": "user", "content": "Hello?"}]


def client(running):
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=60)


def seeded(**fields):
    """Greedy, so that two requests give one answer; the protocol has no seed."""
    extra = {"temperature": 0, **fields.pop("extra_body", {})}
    return {"model": "tiny", "max_tokens": 20, "messages": HELLO, "extra_body": extra} | fields


@pytest.fixture(scope="module")
def tooled(start, tmp_path_factory):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tiny_models.TEMPLATE
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("tooled"), template))


def test_streams_give_the_same_as_whole_answers(running):
    rng = np.random.default_rng()
    for _ in range(6):
        said = "".join(rng.choice(list("abcdefg é東\n"), 12))
        whole = client(running).messages.create(
            **seeded(system="Be brief.", messages=[{"role": "user", "content": said}])
        )
        with client(running).messages.stream(
            **seeded(system="Be brief.", messages=[{"role": "user", "content": [{"type": "text", "text": said}]}])
        ) as stream:
            final = stream.get_final_message()
        assert [b.text for b in final.content] == [b.text for b in whole.content] and len(whole.content[0].text) == 20
        assert (final.stop_reason, whole.stop_reason) == ("max_tokens", "max_tokens")
        assert final.usage.output_tokens == whole.usage.output_tokens == 20


def test_stop_sequences_and_counts(running):
    text = client(running).messages.create(**seeded()).content[0].text
    stop = text[7:9]
    answer = client(running).messages.create(**seeded(stop_sequences=[stop]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.find(stop)]
    counted = client(running).messages.count_tokens(model="tiny", messages=HELLO).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_a_form_that_is_asked_for_is_kept(running):
    form = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    fields = {"output_config": {"format": {"type": "json_schema", "schema": form}}, "max_tokens": 100}
    answer = client(running).messages.create(**seeded(cache_control={"type": "ephemeral", "ttl": "1h"}, **fields))
    assert answer.stop_reason == "end_turn" and isinstance(json.loads(answer.content[0].text)["n"], int)
    with client(running).messages.stream(**seeded(**fields)) as stream:
        assert stream.get_final_text() == answer.content[0].text
    counted = client(running).messages.count_tokens(
        model="tiny", messages=HELLO, output_config=fields["output_config"], cache_control={"type": "ephemeral"}
    )
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_what_the_assistant_has_begun_goes_on(running):
    """A last message of its own is the beginning of the answer, which has what follows alone."""
    begun = [*HELLO, {"role": "assistant", "content": "It is q"}]
    fields = {"messages": begun, "continue_final_message": True}
    with running.http as http:
        ids = http.post("/tokenize", json=fields).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "<user>Hello?<assistant>It is q"
        greedy = {"model": "tiny", "temperature": 0, "max_tokens": 12}
        expected = http.post("/v1/completions", json={"prompt": ids, **greedy}).json()["choices"][0]["text"]
        chat = http.post("/v1/chat/completions", json={**fields, **greedy}).json()["choices"][0]["message"]["content"]
        options = {"temperature": 0, "num_predict": 12}
        ollama = http.post(
            "/api/chat", json={"model": "tiny", "messages": begun, "stream": False, "options": options}
        ).json()
        other = http.post("/v1/chat/completions", json={"messages": begun, **greedy}).json()["choices"][0]["message"]
        for wrong, said in (
            ({"messages": HELLO, "continue_final_message": True}, "no text of the assistant's"),
            ({**fields, "add_generation_prompt": True}, "set one to false"),
        ):
            refused = http.post("/v1/chat/completions", json=wrong | greedy)
            assert refused.status_code == 400 and said in refused.json()["error"]["message"]
    answer = client(running).messages.create(**seeded(messages=begun, max_tokens=12))
    assert answer.content[0].text == chat == ollama["message"]["content"] == expected != other["content"]
    counted = client(running).messages.count_tokens(model="tiny", messages=begun).input_tokens
    assert counted == len(ids)


def test_tools_that_are_not_told_do_not_count(tooled):
    fields = {"model": "tiny", "messages": HELLO, "tools": [TOOL]}
    with_tools = client(tooled).messages.count_tokens(**fields).input_tokens
    counted = client(tooled).messages.count_tokens(**fields, tool_choice={"type": "none"}).input_tokens
    usage = client(tooled).messages.create(**fields, tool_choice={"type": "none"}, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens < with_tools


def test_forced_calls(tooled):
    fields = seeded(max_tokens=300, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    whole = client(tooled).messages.create(**fields)
    [block] = whole.content
    assert (block.type, block.name, whole.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(block.input) == {"city"}
    with client(tooled).messages.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert final.content[0].input == block.input
    assert json.loads("".join(e.partial_json for e in events if e.type == "input_json")) == block.input
    turns = [*HELLO, {"role": "assistant", "content": whole.content}]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Sun."}
    again = client(tooled).messages.create(
        **seeded(tools=[TOOL], messages=[*turns, {"role": "user", "content": [result]}])
    )
    assert again.content


def test_refusals_have_its_form(running):
    with pytest.raises(anthropic.BadRequestError) as refused:
        client(running).messages.create(**seeded(extra_body={"wonders": 1}))
    assert refused.value.body["type"] == "error" and "wonders" in refused.value.body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        client(running).messages.create(**seeded(model="other"))
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client(running).messages.create(**seeded(tools=[TOOL]))
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client(running).messages.create(**seeded(tools=[TOOL], extra_body={"tool_choice": {"type": "tool"}}))
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client(running).messages.create(**seeded(max_tokens=5000))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiError(400, "x"), "invalid_request_error"),
        (ApiError(401, "x"), "authentication_error"),
        (ApiError(403, "x"), "permission_error"),
        (ApiError(404, "x"), "not_found_error"),
        (ApiError(408, "x"), "invalid_request_error"),
        (ApiError(413, "x"), "request_too_large"),
        (ApiError(429, "x"), "rate_limit_error"),
        (ApiError(500, "x"), "api_error"),
        (ApiError(503, "x"), "api_error"),
        (ApiError(503, "x", retry_s=5), "overloaded_error"),
        (ApiError(504, "x"), "timeout_error"),
    ],
)
def test_refusals_have_its_types(error, kind):
    body = error.body("/v1/messages")
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    if kind != "request_too_large":  # which its documents have, and its client has not
        anthropic.types.shared.ErrorResponse.model_validate(body, strict=True)


def test_faults_in_the_midst_of_a_stream_have_its_types(start):
    running = start(max_model_len=32768, kv_cache_tokens=33000, options={"deadline": 0.2})
    with pytest.raises(anthropic.APIStatusError) as late:
        list(client(running).messages.create(**seeded(max_tokens=30000, stream=True)))
    assert (late.value.body["type"], late.value.body["error"]["type"]) == ("error", "timeout_error")


def test_results_that_are_errors_are_shown_as_such(tooled):
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "a"}}

    def counted(**result):
        parts = [{"type": "tool_result", "tool_use_id": "toolu_1", **result}]
        messages = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": parts}]
        return client(tooled).messages.count_tokens(model="tiny", messages=messages, tools=[TOOL]).input_tokens

    assert counted(content="No such city.", is_error=True) == counted(content="Error: No such city.")
    assert counted(content="Sun.", is_error=False) == counted(content="Sun.") < counted(content="Sun.", is_error=True)
