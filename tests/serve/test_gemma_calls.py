"""Gemma 4's calls, in a notation of their own, and the lists of Nemotron, Apriel and LFM2: read however the stream is cut."""

from __future__ import annotations

import json
import re

import pytest
from growing import grown
from hypothesis import given
from hypothesis import strategies as st

from engine.answers import PartialCall, Reader

TOOLS = {"weather": {}, "now": {}}
Q = '<|"|>'


def gemma(name, arguments):
    return f"<|tool_call>call:{name}{arguments}<tool_call|>"


def written(value):
    """A value in Gemma's notation."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return f"{Q}{value}{Q}" if isinstance(value, str) else "None" if value is None else json.dumps(value)


ODD = {"city": 'a, {b}:[c <tool_call|> "d"\n', "n": -1.5e3, "deep": {"list": [[], [True, None], {}], "s": ""}}
TEXTS = {
    "one": (f"I look. {gemma('weather', written(ODD))}", "I look.", [("weather", ODD)]),
    "two": (gemma("now", "{}") + gemma("weather", written({"city": "x"})), "", [("now", {}), ("weather", {"city": "x"})]),
    "spaces": (gemma("weather", f"{{ city : {Q} x {Q} , n : 3 }}"), "", [("weather", {"city": " x ", "n": 3})]),
    "keys between marks": (gemma("weather", f"{{{Q}a b{Q}:1}}"), "", [("weather", {"a b": 1})]),
    "a text without marks": (gemma("weather", "{city:New York}"), "", [("weather", {"city": "New York"})]),
    "no closing mark": (f"<|tool_call>call:weather{written({'city': 'x'})}", "", [("weather", {"city": "x"})]),
    "another tool": (gemma("other", "{}"), gemma("other", "{}"), []),
    "no object": (gemma("weather", "{city}"), gemma("weather", "{city}"), []),
    "cut": ("<|tool_call>call:weather{city:<|", "<|tool_call>call:weather{city:<|", []),
    "LFM2": (
        "So <|tool_call_start|>[weather(city='x', n=3, deep={\"a\": null, \"b\": [true, False]}), now()]<|tool_call_end|>",
        "So",
        [("weather", {"city": "x", "n": 3, "deep": {"a": None, "b": [True, False]}}), ("now", {})],
    ),
    "Nemotron": (
        'So <TOOLCALL>[{"name": "weather", "arguments": {"city": "x"}}, {"name": "now", "arguments": {}}]</TOOLCALL>',
        "So",
        [("weather", {"city": "x"}), ("now", {})],
    ),
    "Apriel": ('\n<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", [("now", {})]),
    "Cohere": (
        '<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
        '"parameters": {"city": "x"}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("weather", {"city": "x"}), ("now", {})],
    ),
    "MiniMax M1": (
        '<tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "weather", "arguments": {"a": 1}}\n</tool_calls>',
        "",
        [("now", {}), ("weather", {"a": 1})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_calls_are_read_as_they_were_written(name, data):
    text, content, calls = TEXTS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for found in (grown(TOOLS, text, cuts), grown(TOOLS, text, range(len(text)))):
        assert (found.content, [(call.name, json.loads(call.arguments)) for call in found.calls]) == (content, calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text().filter(lambda text: Q not in text),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4))
def test_any_object(arguments):
    found = Reader(TOOLS).read(gemma("weather", written(arguments)), finished=True)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("weather", arguments)]


PIECES = re.findall(r"<[^>]*>|\w+|\W", gemma("weather", written(ODD)))
PIECES += ["<|tool_call>call:now{", "call:now{}", "<|tool"]


@given(st.lists(st.sampled_from(PIECES)))
def test_any_text_streams_as_it_is_read_whole(pieces):
    text = "".join(pieces)
    assert grown(TOOLS, text, range(len(text))) == Reader(TOOLS).read(text, finished=True)


def test_brackets_that_nest_beyond_all_measure_are_no_call():
    text = gemma("weather", "{a:" + "[" * 100_000 + "]" * 100_000 + "}")
    assert Reader(TOOLS).read(text, finished=True).calls == ()


def test_thoughts_come_before():
    text = f"<|channel>thought\nHm, {gemma('now', '{}')}?\n<channel|>{gemma('now', '{}')}"
    found = grown(TOOLS, text, range(len(text)))
    assert found.reasoning == f"Hm, {gemma('now', '{}')}?" and found.calls == (PartialCall("now", "{}"),)
    assert grown(TOOLS, "<|channel>thought\n<channel|>Hi.", range(10)).content == "Hi."
