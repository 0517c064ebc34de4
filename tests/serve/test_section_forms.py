"""Calls that a model must make, or may make beside a form or a text, between the marks that DeepSeek's, Kimi K2's and Mistral's
chat templates show."""

from __future__ import annotations

import json

import jsonschema
import pytest
import tiny_models
from test_tagged_forms import FORM, HM, Model, tool

from engine.answers import Reader, Reading

PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["count"],
    "additionalProperties": False,
}
TOOLS = [tool("weather", PARAMETERS), tool("empty", {"additionalProperties": False}), tool("a b")]


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


def deepseek(*calls, between=""):
    return f"<｜tool▁calls▁begin｜>{between.join(calls)}<｜tool▁calls▁end｜>"


def r1(*calls):
    head = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    return deepseek(*(f"{head}{n}\n```json\n{dumped(v)}\n```<｜tool▁call▁end｜>" for n, v in calls), between="\n")


def v31(*calls):
    return deepseek(*(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(v)}<｜tool▁call▁end｜>" for n, v in calls))


def kimi(*calls):
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{dumped(members)}<|tool_call_end|>"
        for place, (name, members) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def nemo(*calls):
    return f"[TOOL_CALLS] {dumped([{'name': name, 'arguments': members} for name, members in calls])}"


def small31(*calls):
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{dumped(members)}" for name, members in calls)


def small32(*calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(members)}" for name, members in calls)


SHOWN = {form.__name__: form for form in (r1, v31, kimi, nemo, small31, small32)}
SPECIAL = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁sep｜>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
)
WEATHER, EMPTY = ("weather", {"text": 'a </｜tool▁sep｜>]"}', "count": 7}), ("empty", {})
WRONG = [("weather", {"count": 10}), ("weather", {"text": "a"}), ("empty", {"a": 1}), ("empty", 5), ("other", {})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Some of the marks are special tokens."""
    return tiny_models.write_marking(tmp_path_factory.mktemp("sections"), dict.fromkeys(SPECIAL, True))


def model_of(folder, name, **fields):
    return Model(folder, lambda *call: SHOWN[name](call), **{"tools": TOOLS} | fields)


@pytest.mark.parametrize("name", SHOWN)
def test_forced_calls_are_as_the_template_shows_them(folder, name):
    write, model = SHOWN[name], model_of(folder, name, tool_choice="required")
    for call in (WEATHER, EMPTY, ("a b", {"any": [1]})):
        assert model.fits(write(call)), call
        assert model.read(write(call)) == ("", [call])
        reading = Reading(Reader(model.wanted.tools, plain=True, one_call=True, tag=model.wanted.tag))
        pieces = [reading.read(write(call)[:cut], finished=False) for cut in range(len(write(call)) + 1)]
        assert not any(piece.content for piece in pieces)
        assert [(one.name, json.loads(one.arguments)) for one in pieces[-1].calls] == [call]
    assert [call for call in WRONG if model.fits(write(call))] == []
    assert not model.fits("So. " + write(EMPTY)) and not model.fits(write(EMPTY, EMPTY))
    assert not model.fits(json.dumps({"name": "empty", "arguments": {}}))
    named = model_of(folder, name, tool_choice={"type": "function", "function": {"name": "empty"}})
    assert named.fits(write(EMPTY)) and not named.fits(write(WEATHER))


@pytest.mark.parametrize("name", SHOWN)
def test_strict_calls_in_any_text(folder, name):
    write, model = SHOWN[name], model_of(folder, name)
    for text in ("", "So.", write(WEATHER), f"I look.\n{write(WEATHER, EMPTY)}"):
        assert model.fits(text), text
    assert model.read(f"I look.\n{write(WEATHER, EMPTY)}") == ("I look.", [WEATHER, EMPTY])
    assert [call for call in WRONG if model.fits("So. " + write(call))] == []


@pytest.mark.parametrize("name", SHOWN)
def test_a_form_or_calls(folder, name):
    write, model = SHOWN[name], model_of(folder, name, response_format=FORM)
    assert model.fits('"yes"') and model.read('"yes"') == ('"yes"', [])
    assert model.fits(write(EMPTY, WEATHER)) and model.read(write(EMPTY, WEATHER)) == ("", [EMPTY, WEATHER])
    assert not model.fits("yes") and not model.fits(f'"yes"{write(EMPTY)}')
    one = model_of(folder, name, response_format=FORM, parallel_tool_calls=False)
    assert one.fits(write(WEATHER)) and not one.fits(write(EMPTY, WEATHER))


@pytest.mark.parametrize("name", SHOWN)
def test_a_served_model_is_held_to_them(start, tmp_path, name):
    """Whatever it draws, whole and streamed."""
    parameters = {**PARAMETERS, "properties": {"count": PARAMETERS["properties"]["count"]}}
    written = SHOWN[name](("name", {}))
    template = f"{{% if tools %}}{{{{ {written!r} }}}}{{{{ tools | tojson }}}}{{% endif %}}{tiny_models.TEMPLATE}"
    running = start(model=tiny_models.write_marking(tmp_path, dict.fromkeys(SPECIAL, True), template))
    fields = {"model": "tiny", "messages": HM, "tools": [tool("weather", parameters)], "tool_choice": "required"}
    fields |= {"max_tokens": 400, "seed": 1}
    answer = running.openai.chat.completions.create(**fields).choices[0]
    [call] = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name) == ("tool_calls", "weather")
    jsonschema.validate(json.loads(call.function.arguments), parameters)
    pieces = [chunk.choices[0].delta for chunk in running.openai.chat.completions.create(**fields, stream=True)]
    streamed = [one.function.arguments for piece in pieces for one in piece.tool_calls or ()]
    assert "".join(streamed) == call.function.arguments
    assert not any(piece.content for piece in pieces)
