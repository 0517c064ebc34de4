"""Calls that a model of the harmony format must make, or may make beside a form or a text: they have its headers."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
import tiny_models

from engine.sampling.grammar import GrammarCompiler
from engine.serve.calling import wanted
from engine.serve.fields import ChatBody

MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"enum": [1, 2, 3]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FORM = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["yes", "no"]}}}
HM = [{"role": "user", "content": "Hm?"}]


@pytest.fixture(scope="module")
def harmony(start, tmp_path_factory):
    return start(model=tiny_models.write_marking(tmp_path_factory.mktemp("harmony"), dict.fromkeys(MARKS, True)))


def ask(harmony, **fields):
    given = {"model": "tiny", "messages": HM, "max_tokens": 600, "tools": [WEATHER, CLOCK]}
    return harmony.openai.chat.completions.create(**(given | fields))


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_are_valid_and_stream(harmony, choice):
    for seed in range(3):
        answer = ask(harmony, tools=[WEATHER], tool_choice=choice, seed=seed).choices[0]
        [call] = answer.message.tool_calls
        assert (answer.finish_reason, call.function.name, answer.message.content) == ("tool_calls", "weather", None)
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        chunks = ask(harmony, tools=[WEATHER], tool_choice=choice, seed=seed, stream=True)
        pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments


def test_a_form_leaves_room_for_calls(harmony):
    def said(letter):
        bias = {str(harmony.engine.tokenizer.encode(letter, False)[-1]): 100}
        return ask(harmony, response_format=FORM, logit_bias=bias, tools=[WEATHER]).choices[0].message

    assert json.loads(said("f").content) in ("yes", "no")
    jsonschema.validate(json.loads(said("c").tool_calls[0].function.arguments), PARAMETERS)


def fits(harmony, text, **fields):
    """Whether the form of the request's answer allows the text, and its end there."""
    model = next(iter(harmony.models.by_name.values()))
    form, tokenizer = wanted(ChatBody(messages=HM, **fields), model).form, harmony.engine.tokenizer
    [matcher] = GrammarCompiler(tokenizer, tiny_models.VOCAB, tokenizer.eos_ids).matchers(form, 1, ignore_eos=False)
    mask = np.zeros((tiny_models.VOCAB + 31) // 32, np.uint32)
    for token in [*tokenizer.encode(text, False, parse_special=True), min(tokenizer.eos_ids)]:
        matcher.fill(mask)
        if not mask[token // 32] >> token % 32 & 1:
            return False
        matcher.advance(token)
    return True


THOUGHT = "<|channel|>analysis<|message|>I need\nit. {}<|end|><|start|>assistant"
SUNNY = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "ab", "days": 2}'
CLOCKED = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"any": [1]}'
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"tools": [WEATHER, CLOCK]},
            [SUNNY, CLOCKED, THOUGHT + SUNNY, f"{THOUGHT}{THOUGHT}{FINAL}So.", FINAL],
            ["", "So.", THOUGHT, SUNNY.replace("2", "4"), SUNNY.replace("weather", "other"), SUNNY[:-1]],
        ),
        (
            {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
            [SUNNY, CLOCKED],
            [THOUGHT + SUNNY, FINAL, "{}", SUNNY.replace("2", "4")],
        ),
        ({"tools": [WEATHER, CLOCK], "tool_choice": NAMED}, [SUNNY], [CLOCKED]),
        (
            {"tools": [WEATHER, CLOCK], "response_format": FORM},
            [SUNNY, FINAL + '"yes"'],
            [FINAL + "yes", FINAL + '"maybe"', '"yes"', THOUGHT + SUNNY],
        ),
    ],
)
def test_what_answers_may_be(harmony, fields, right, wrong):
    assert [text for text in right if not fits(harmony, text, **fields)] == []
    assert [text for text in wrong if fits(harmony, text, **fields)] == []


@pytest.mark.parametrize("name", ["get weather", "a<b", 'a"b'])
def test_a_name_that_no_header_can_tell(harmony, name):
    """Its call is a plain object, as any model's."""
    tool = {"type": "function", "function": {"name": name}}
    [call] = ask(harmony, tools=[tool], tool_choice="required").choices[0].message.tool_calls
    assert call.function.name == name


def test_an_answer_that_goes_on_has_no_header(harmony):
    begun = [*HM, {"role": "assistant", "content": "Well"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    answer = ask(harmony, messages=begun, extra_body=more, max_tokens=3, temperature=0).choices[0].message
    assert len(answer.content) == 3
