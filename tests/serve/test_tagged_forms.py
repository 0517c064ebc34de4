"""Calls that a model must make, or may make beside a form or a text, in the tags that its chat template shows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import tiny_models

from engine.answers import Reader
from engine.formats import open_checkpoint
from engine.formats.chat_template import ChatTemplate
from engine.sampling.grammar import GrammarCompiler
from engine.serve.calling import wanted
from engine.serve.fields import ChatBody

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Any."},
        "unit": {"$ref": "#/$defs/unit"},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "list": {"type": "array", "items": {"$ref": "#/$defs/unit"}, "maxItems": 2},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"unit": {"type": "string", "enum": ["warm", "cold"]}},
}
HELD = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,8}$"}}, "required": ["city"]}


def tool(name, parameters=None, strict=True):
    function = {"name": name, "strict": strict} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


TOOLS = [tool("weather", PARAMETERS), tool("held", HELD), tool("empty", {"additionalProperties": False}), tool("open")]
HM = [{"role": "user", "content": "Hm?"}]
FORM = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["yes", "no"]}}}


def qwen(name, members):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in members.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def seed(name, members):
    inner = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in members.items())
    return f"<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"


def glm(name, members):
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in members.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def minimax(name, members):
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in members.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>'


def hermes(name, members):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': members})}\n</tool_call>"


IN_TAGS = {form.__name__: form for form in (qwen, seed, glm, minimax)}
MARKS = {"<minimax:tool_call>": True, "</minimax:tool_call>": True}


class Model:
    """What the forms are made of, and whether a text keeps to one."""

    def __init__(self, folder, form, **fields):
        self.tokenizer = open_checkpoint(folder).tokenizer()
        self._compiler = GrammarCompiler(self.tokenizer, tiny_models.VOCAB, self.tokenizer.eos_ids)
        llm = SimpleNamespace(engine=SimpleNamespace(tokenizer=self.tokenizer))
        template = ChatTemplate(form("name", {"key": "value"}))
        served = SimpleNamespace(llm=llm, template=lambda: template)
        self.wanted = wanted(ChatBody(messages=HM, **{"tools": TOOLS} | fields), served)

    def fits(self, text):
        [matcher] = self._compiler.matchers(self.wanted.form, 1, ignore_eos=False)
        mask = np.zeros((tiny_models.VOCAB + 31) // 32, np.uint32)
        for token in [*self.tokenizer.encode(text, False, parse_special=True), min(self.tokenizer.eos_ids)]:
            matcher.fill(mask)
            if not mask[token // 32] >> token % 32 & 1:
                return False
            matcher.advance(token)
        return True

    def read(self, text):
        asked = self.wanted
        found = Reader(asked.tools, plain=asked.plain, one_call=asked.one_call, tag=asked.tag).read(text, True)
        return found.content, [(call.name, json.loads(call.arguments)) for call in found.calls]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two of the marks are special tokens."""
    return tiny_models.write_marking(tmp_path_factory.mktemp("tagged"), MARKS)


RIGHT = [
    ("weather", {"text": " \n<b> {", "count": "7"}, {"text": " \n<b> {", "count": 7}),
    (
        "weather",
        {"text": "", "unit": "cold", "count": "0", "list": '["warm"]', "either": "null"},
        {"text": "", "unit": "cold", "count": 0, "list": ["warm"], "either": None},
    ),
    ("weather", {"text": "5", "count": "5", "either": "5"}, {"text": "5", "count": 5, "either": "5"}),
    ("empty", {}, {}),
    ("open", {}, {}),
    ("open", {"any": "[1]", "a b": "c"}, {"any": [1], "a b": "c"}),
]
WRONG = [
    ("weather", {"text": "a"}),
    ("weather", {"text": "a", "count": "10"}),
    ("weather", {"text": "a", "count": "seven"}),
    ("weather", {"text": "a", "unit": "mild", "count": "1"}),
    ("weather", {"text": "a", "count": "1", "list": '["mild"]'}),
    ("weather", {"text": "a", "count": "1", "more": "b"}),
    ("held", {"city": "ab"}),
    ("empty", {"a": "b"}),
    ("other", {}),
]


@pytest.mark.parametrize("form", IN_TAGS)
def test_forced_calls_are_as_the_template_shows_them(folder, form):
    write = IN_TAGS[form]
    model = Model(folder, write, tool_choice="required")
    for name, written, arguments in RIGHT:
        assert model.fits(write(name, written)), (name, written)
        assert model.read(write(name, written)) == ("", [(name, arguments)])
        schema = next(one["function"].get("parameters", {}) for one in TOOLS if one["function"]["name"] == name)
        jsonschema.validate(arguments, schema)
    assert [one for one in WRONG if model.fits(write(*one))] == []
    assert not model.fits("So. " + write("empty", {}))
    named = Model(folder, write, tool_choice={"type": "function", "function": {"name": "empty"}})
    assert named.fits(write("empty", {})) and not named.fits(write("open", {}))


@pytest.mark.parametrize("form", IN_TAGS)
def test_what_tags_cannot_hold_to_a_schema_is_an_object(folder, form):
    """Such as a text with a pattern."""
    mark, end = IN_TAGS[form]("", {}).split("\n")[0].rstrip(), IN_TAGS[form]("", {}).split("\n")[-1]
    call = f'{mark}\n{{"name": "held", "arguments": {{"city": "ab"}}}}\n{end}'
    model = Model(folder, IN_TAGS[form], tool_choice="required")
    assert model.fits(call) and model.read(call) == ("", [("held", {"city": "ab"})])
    assert not model.fits(call.replace("ab", "AB")) and not model.fits(call.replace("held", "empty"))


def test_forced_calls_of_objects_in_tags(folder):
    model = Model(folder, hermes, tool_choice="required")
    call = hermes("weather", {"text": "a", "count": 7})
    assert model.fits(call) and model.read(call) == ("", [("weather", {"text": "a", "count": 7})])
    assert not model.fits(call.replace("7", "10")) and not model.fits(qwen("empty", {}))


@pytest.mark.parametrize("form", IN_TAGS)
def test_strict_calls_in_any_text(folder, form):
    write, loose = IN_TAGS[form], tool("loose", PARAMETERS, strict=False)
    model = Model(folder, write, tools=[*TOOLS, loose])
    sunny, empty = write("weather", {"text": "a", "count": "1"}), write("empty", {})
    for text in ("", "So.", sunny, f"<think>Hm</think>\nI look.\n{sunny}\n{empty}", write("loose", {"text": "a"})):
        assert model.fits(text), text
    assert model.read(f"I look.\n{sunny}\n{empty}")[1] == [("weather", {"text": "a", "count": 1}), ("empty", {})]
    assert [one for one in WRONG if model.fits("So. " + write(*one))] == []
    assert Model(folder, write, tools=[loose]).wanted.form is None


@pytest.mark.parametrize("form", IN_TAGS)
def test_a_form_or_calls(folder, form):
    empty = IN_TAGS[form]("empty", {})
    model = Model(folder, IN_TAGS[form], response_format=FORM)
    assert model.fits('"yes"') and model.read('"yes"') == ('"yes"', [])
    assert model.fits(f"{empty}\n{empty}") and model.read(f"{empty}\n{empty}") == ("", [("empty", {})] * 2)
    assert not model.fits("yes") and not model.fits(f'"yes"{empty}')


@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "maxLength": 3},
        {"type": "string", "enum": ["a", " b"]},
        {"$ref": "#/$defs/short"},
        {"anyOf": [{"$ref": "#/$defs/short"}, {"type": "null"}]},
        {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 3}]},
        {"type": ["string", "array"]},
        {"allOf": [{"type": "string"}]},
        {"type": "array", "items": {"$ref": "#"}},
        {},
    ],
)
def test_values_that_no_plain_text_can_be_held_to(folder, part):
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    schema["$defs"] = {"short": {"type": "string", "maxLength": 3}}
    model = Model(folder, qwen, tools=[tool("one", schema)], tool_choice="required")
    assert not any(model.fits(qwen("one", {"a": text})) for text in ("abcd", "a", "5", " b", "[]"))


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"type": "object", "properties": {"a": True}}, {"a": [1]}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}, {"a": "b", "b": 1}),
        ({"type": "object", "properties": {"a>": {"type": "string"}}}, {"a>": "b"}),
    ],
)
def test_schemas_that_tags_leave_to_an_object(folder, parameters, arguments):
    model = Model(folder, qwen, tools=[tool("one", parameters)], tool_choice="required")
    assert model.fits(hermes("one", arguments)) and model.read(hermes("one", arguments)) == ("", [("one", arguments)])
    assert not model.fits(qwen("one", {"a": "1"})) and not model.fits(qwen("one", {}))


def test_a_served_model_is_held_to_them(start, tmp_path):
    """Whatever it draws."""
    parameters = {
        **PARAMETERS,
        "properties": {k: v for k, v in PARAMETERS["properties"].items() if k not in ("text", "either")},
    }
    parameters["required"] = ["count", "unit"]
    template = "{% if tools %}" + qwen("name", {}) + "{{ tools | tojson }}{% endif %}" + tiny_models.TEMPLATE
    running = start(model=tiny_models.write_talker(tmp_path, template))
    for number in range(4):
        fields = {"model": "tiny", "messages": HM, "tools": [tool("weather", parameters)], "seed": number}
        answer = running.openai.chat.completions.create(**fields, tool_choice="required", max_tokens=400).choices[0]
        [call] = answer.message.tool_calls
        assert (answer.finish_reason, call.function.name) == ("tool_calls", "weather")
        jsonschema.validate(json.loads(call.function.arguments), parameters)
