"""Calls in tags, whose values are plain text: of any values, however the stream is cut, by the types of the tool's schema."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.answers import Reader, Reading

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "list": {"type": "array"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}
TOOLS = {"weather": SCHEMA, "clock": {}}
VALUES = {
    "text": st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(lambda text: "</" not in text),
    "count": st.integers(),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "on": st.booleans(),
    "list": st.lists(
        st.sampled_from(["a", 1, None, "<b>", '"</parameter>', {"c": ["\\n</arg_value>", "</tool_call>"]}]), max_size=3
    ),
    "either": st.one_of(st.integers(), st.none()),
    "unknown": st.one_of(st.integers(), st.just("a text")),
}


def plain(value):
    return value if isinstance(value, str) else json.dumps(value)


def qwen(name, members):
    inner = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in members.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def unwrapped(name, members):
    return qwen(name, members).removeprefix("<tool_call>\n")


def seed(name, members):
    inner = qwen(name, members).removeprefix("<tool_call>").removesuffix("</tool_call>")
    return f"<seed:tool_call>{inner}</seed:tool_call>"


def glm(name, members):
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>\n{plain(value)}\n</arg_value>\n" for key, value in members.items()
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def minimax(name, members):
    inner = "".join(f'<parameter name="{key}">\n{plain(value)}\n</parameter>\n' for key, value in members.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>'


def granite(name, members):
    return "<|tool_call|>" + json.dumps([{"name": name, "arguments": members}])


def deepseek_r1(name, members):
    body = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(members)}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseek_v31(name, members):
    body = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(members)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def kimi(name, members):
    body = f"<|tool_call_begin|>functions.{name}:12<|tool_call_argument_begin|>{json.dumps(members)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


FORMS = {
    form.__name__: form for form in (qwen, unwrapped, seed, glm, minimax, granite, deepseek_r1, deepseek_v31, kimi)
}


def read(text, cuts):
    """What has come at last, of what only ever grows."""
    reading, before = Reading(Reader(TOOLS)), None
    for cut in [*cuts, len(text)]:
        found = reading.read(text[:cut], finished=False)
        if before is not None:
            assert found.content.startswith(before.content) and len(found.calls) >= len(before.calls)
            for old, new in zip(before.calls, found.calls, strict=False):
                assert (old.name, new.arguments[: len(old.arguments)]) == (new.name, old.arguments)
        before = found
    return reading.read(text, finished=True)


@pytest.mark.parametrize("form", FORMS)
@given(members=st.fixed_dictionaries({}, optional=VALUES), data=st.data())
@example(members={"text": "\n<tool_call> {\n\n"}, data=None)
def test_a_call_is_read_as_it_was_written(form, members, data):
    text = f"I look.\n{FORMS[form]('weather', members)}\n{FORMS[form]('clock', {})}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))) if data else ()
    for found in (read(text, cuts), read(text, range(len(text)))):
        assert found.content == "I look."
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [
            ("weather", members),
            ("clock", {}),
        ]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call>weather is fine", "<tool_call>weather is fine", []),
        ("<function=other>\n</function>", "<function=other>\n</function>", []),
        ("a <function=wea", "a <function=wea", []),
        ("<tool_call>weather", "<tool_call>weather", []),
        ("<function=clock>\n<parameter=a>\nx", "", [("clock", "{")]),
        ("<function=clock>\n<parameter=a>\nx\n</parameter>\n", "", [("clock", '{"a": "x"')]),
        ("<function=clock>\n<parameter=a>x</parameter>\n</tool_call>", "", [("clock", '{"a": "x"}')]),
        ("<function=clock>\n<parameter=a>NaN</parameter></function>", "", [("clock", '{"a": "NaN"}')]),
        ("<function=weather><parameter=on>True</parameter></function>", "", [("weather", '{"on": true}')]),
        ("<function=weather><parameter=count>many</parameter></function>", "", [("weather", '{"count": "many"}')]),
        ("<function=weather><parameter=share>3</parameter></function>", "", [("weather", '{"share": 3}')]),
        ("<function=weather><parameter=list>[1, </parameter></function>", "", [("weather", '{"list": "[1, "}')]),
        (
            "<function=weather><parameter=list>['a', None]</parameter></function>",
            "",
            [("weather", '{"list": ["a", null]}')],
        ),
        ("<function=weather><parameter=list>(1,)</parameter></function>", "", [("weather", '{"list": "(1,)"}')]),
        ("<function=weather><parameter=text>3</parameter></function>", "", [("weather", '{"text": "3"}')]),
        ('<function=weather><parameter=text>"3"</parameter></function>', "", [("weather", '{"text": "\\"3\\""}')]),
    ],
)
def test_texts(text, content, calls):
    for found in (read(text, ()), read(text, range(len(text)))):
        assert (found.content, [(call.name, call.arguments) for call in found.calls]) == (content, calls)


@pytest.mark.parametrize("part", [{"type": 5}, {"anyOf": 5}, {"type": [[]], "oneOf": [5]}, {"enum": 5}, 5])
def test_schemas_that_are_none(part):
    """Nothing looks at them before a call is read."""
    reader = Reader({"clock": {"properties": {"a": part}}})
    [call] = reader.read("<function=clock><parameter=a>1</parameter></function>", True).calls
    assert call.arguments == '{"a": 1}'


REFERRED = {
    "$defs": {
        "place": {"type": "object"},
        "digit": {"enum": ["1", "2"]},
        "round": {"anyOf": [{"$ref": "#/$defs/round"}, {"$ref": "#/$defs/place"}]},
        "a/b": {"type": "integer"},
    }
}


@pytest.mark.parametrize(
    ("part", "text", "value"),
    [
        ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/digit"}, {"type": "null"}]}, "1", "1"),
        ({"$ref": "#/$defs/digit"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/digit"}]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/round"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/a~1b"}, "1", 1),
        ({"$ref": "#/$defs/none"}, "1", 1),
        ({"$ref": "http://x/y"}, "1", 1),
        ({"anyOf": [True, {"type": "null"}]}, "1", 1),
        ({"anyOf": [{}, {"type": "null"}]}, "1", 1),
    ],
)
def test_types_of_what_a_schema_refers_to(part, text, value):
    """As pydantic writes models within models, optional ones above all."""
    reader = Reader({"clock": {"properties": {"a": part}, **REFERRED}})
    [call] = reader.read(f"<function=clock><parameter=a>{text}</parameter></function>", True).calls
    assert json.loads(call.arguments) == {"a": value}
