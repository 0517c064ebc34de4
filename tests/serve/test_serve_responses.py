"""OpenAI's client and its newer protocol against a real server."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
import tiny_models

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def tooled(start, tmp_path_factory):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tiny_models.TEMPLATE
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("tooled"), template))


def ask(running, **fields):
    given = {"model": "tiny", "input": "Hello?", "max_output_tokens": 20, "temperature": 0} | fields
    return running.openai.responses.create(**given)


def test_streams_give_the_same_as_whole_answers(running):
    rng = np.random.default_rng()
    for _ in range(6):
        said = "".join(rng.choice(list("abcdefg é東\n"), 12))
        whole = ask(running, input=said, instructions="Be brief.")
        assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
        assert len(whole.output_text) == 20 and whole.usage.output_tokens == 20
        events = list(ask(running, input=[{"role": "user", "content": said}], instructions="Be brief.", stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
        assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
        done = [event.item.status for event in events if event.type == "response.output_item.done"]
        assert done == [item.status for item in whole.output] == ["incomplete"]


def test_thoughts_are_no_more_tokens_than_there_are(start, tmp_path):
    """Tokens that are no whole characters are shown as others, which may be more tokens."""
    template = tiny_models.TEMPLATE.replace("<assistant>", "<assistant><think>")
    running = start(model=tiny_models.write_talker(tmp_path, template))
    for _ in range(5):
        used = ask(running, temperature=1.5).usage
        assert 0 < used.output_tokens_details.reasoning_tokens <= used.output_tokens == 20


def test_forms(running):
    form = {
        "type": "json_schema",
        "name": "n",
        "schema": {"type": "integer", "minimum": 10, "maximum": 99},
        "strict": True,
    }
    answer = ask(running, text={"format": form})
    assert answer.status == "completed" and 10 <= json.loads(answer.output_text) <= 99


def test_calls_and_their_results(tooled):
    fields = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300}
    whole = ask(tooled, **fields)
    [call] = whole.output
    assert (call.type, call.name) == ("function_call", "weather") and set(json.loads(call.arguments)) == {"city"}
    with tooled.openai.responses.stream(
        model="tiny", input="Hello?", temperature=0, tools=[TOOL], tool_choice="required", max_output_tokens=300
    ) as stream:
        final = stream.get_final_response()
    assert final.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}
    again = ask(tooled, input=[{"role": "user", "content": "Hello?"}, *whole.output, result], tools=[TOOL])
    assert len(again.output_text) == 20
    told = [item.model_dump() for item in whole.output]  # with null for all that was not there
    same = ask(tooled, input=[{"role": "user", "content": "Hello?"}, *told, result], tools=[TOOL])
    assert same.output_text == again.output_text
    openai.types.responses.Response.model_validate(same.model_dump())
    parts = result | {"output": [{"type": "input_text", "text": "S"}, {"type": "input_text", "text": "un."}]}
    same = ask(tooled, input=[{"role": "user", "content": "Hello?"}, *whole.output, parts], tools=[TOOL])
    assert (same.output_text, same.usage.input_tokens) == (again.output_text, again.usage.input_tokens)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"temperature": 500}, "temperature"),
        ({"max_output_tokens": 5000}, None),
        ({"tools": [{"type": "web_search"}]}, None),
        ({"input": []}, "input"),
    ],
)
def test_refusals(running, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(running, **fields)
    assert param is None or refused.value.body["param"] == param
