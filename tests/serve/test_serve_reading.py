"""Tool calls and reasoning: what streams adds up to the whole answer, whatever the text is cut into."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from engine.answers import Reader, Reading
from engine.runtime.outputs import CompletionOutput
from engine.serve.chat import Chat
from engine.serve.deltas import Delta

CALL = '{"name": "weather", "arguments": {"city": "a \\"}{ b", "days": [1, {"x": null}]}}'
ARGUMENTS = '{"city": "a \\"}{ b", "days": [1, {"x": null}]}'
TEXTS = {
    "Qwen, Hermes": (f"I will look.\n<tool_call>\n{CALL}\n</tool_call>", "I will look.", [("weather", ARGUMENTS)]),
    "two": (
        f'<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "Llama 3": ('{"name": "weather", "parameters": {"city": "b"}}', "", [("weather", '{"city": "b"}')]),
    "Llama 3, marked": ('<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}', "", [("clock", "{}")]),
    "Llama 3, two": (f'{CALL}; {{"name": "clock", "parameters": {{}}}}', "", [("weather", ARGUMENTS), ("clock", "{}")]),
    "Mistral": (f"[TOOL_CALLS] [{CALL}]", "", [("weather", ARGUMENTS)]),
    "Mistral, after text": (f"I will look. [TOOL_CALLS] [{CALL}]", "I will look.", [("weather", ARGUMENTS)]),
    "Mistral, by name": (
        f"So.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock[CALL_ID]a1B2c3D4e[ARGS]{{}}",
        "So.",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "Mistral, by name alone": ('[TOOL_CALLS]clock{"a": 1}', "", [("clock", '{"a": 1}')]),
    "Mistral, by name, cut": ('[TOOL_CALLS]weather[ARGS]{"city": "lo', "", [("weather", '{"city": "lo')]),
    "Mistral, by a longer name": ("[TOOL_CALLS]clock_all[ARGS]{}", "", [("clock_all", "{}")]),
    "Mistral, by a name that is unknown": ("[TOOL_CALLS]clocks[ARGS]{}", "[TOOL_CALLS]clocks[ARGS]{}", []),
    "Mistral, by an unknown name, then another": (
        "[TOOL_CALLS]clocks[ARGS]{}[TOOL_CALLS]clock[ARGS]{}",
        "[TOOL_CALLS]clocks[ARGS]{}",
        [("clock", "{}")],
    ),
    "Mistral, a name in a text": ("[TOOL_CALLS]clock it is", "[TOOL_CALLS]clock it is", []),
    "Llama, Python": (
        """<|python_tag|>weather.call(city="a' )\\n\\d", days=[1, -2.5, {'x': None}], now=True)<|eom_id|>""",
        "",
        [("weather", r"""{"city": "a' )\n\\d", "days": [1, -2.5, {"x": null}], "now": true}""")],
    ),
    "Llama, a list in Python": (
        r"[weather(city='it\'s'), clock()]",
        "",
        [("weather", '{"city": "it\'s"}'), ("clock", "{}")],
    ),
    "Llama, Python, cut": ('<|python_tag|>weather.call(city="lo', '<|python_tag|>weather.call(city="lo', []),
    "Llama, Python that is no call": (
        f'<|python_tag|>clock = weather("a"); <|python_tag|>weather(**x)<|python_tag|>{CALL}',
        '<|python_tag|>clock = weather("a"); <|python_tag|>weather(**x)',
        [("weather", ARGUMENTS)],
    ),
    "Llama, no literals": ("<|python_tag|>clock.call(a=f(1))", "<|python_tag|>clock.call(a=f(1))", []),
    "a name in a text": ("[weather (it rains)]", "[weather (it rains)]", []),
    "Python in a text": ('weather.call(city="a")', 'weather.call(city="a")', []),
    "a mark alone": ("so [TOOL_CALLS] are marks", "so [TOOL_CALLS] are marks", []),
    "Mistral, unmarked": (
        f' [{CALL}, {{"name": "clock", "arguments": {{}}}}]',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "arguments as a string": (
        '<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("clock", '{"a": 1}')],
    ),
    "arguments as a list": ('{"name": "clock", "parameters": [1, {"a": 2}]}', "", [("clock", '[1, {"a": 2}]')]),
    "escapes that are none": (
        '{"name": "\\q", "arguments": "\\q"}',
        '{"name": "\\q", "arguments": "\\q"}',
        [],
    ),
    "arguments with an escape that is none": ('{"name": "clock", "arguments": "\\q"}', "", [("clock", '"\\q"')]),
    "no arguments": ('{"name": "clock", "arguments": null}', "", [("clock", "{}")]),
    "name last": ('{"arguments": {"a": 1}, "name": "clock"}', "", [("clock", '{"a": 1}')]),
    "cut": ('<tool_call>\n{"name": "weather", "arguments": {"city": "lo', "", [("weather", '{"city": "lo')]),
    "text": ("Just a text, with {braces} and <tool_ no call.", "Just a text, with {braces} and <tool_ no call.", []),
    "JSON": ('{"a": [1, 2, {"name": "weather"}]}', '{"a": [1, 2, {"name": "weather"}]}', []),
    "unknown": ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    "tagged unknown": ("<tool_call>{}</tool_call> x", "<tool_call>{}</tool_call> x", []),
    "tag in an argument": (
        '{"name": "clock", "arguments": {"x": "<tool_call>"}}',
        "",
        [("clock", '{"x": "<tool_call>"}')],
    ),
    "mark in an argument": (
        '{"name": "clock", "arguments": {"x": "[TOOL_CALLS]"}}',
        "",
        [("clock", '{"x": "[TOOL_CALLS]"}')],
    ),
    "JSON, then a call": (f'{{"a": 1}} <tool_call>{CALL}</tool_call>', '{"a": 1}', [("weather", ARGUMENTS)]),
    "text between": (
        f'<tool_call>{CALL}</tool_call>\nNow the other < one:\n<tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call> ok',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "one that is none between": (
        f'<tool_call>{CALL}<tool_call>{{"name": "x"}}<tool_call>no<tool_call>{{"name": "clock"}}',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "tag in a text before": (
        f"I write <tool_call>, and then <tool_call>\n{CALL}\n</tool_call>",
        "I write <tool_call>, and then",
        [("weather", ARGUMENTS)],
    ),
    "mark in a text before": (
        f"A [TOOL_CALLS] is [1]. [TOOL_CALLS] [{CALL}]",
        "A [TOOL_CALLS] is [1].",
        [("weather", ARGUMENTS)],
    ),
    "an unknown tool before": (
        f'<tool_call>{{"name": "x", "arguments": {{"a": "<tool_call>{{}}"}}}}</tool_call>\n<tool_call>{CALL}',
        '<tool_call>{"name": "x", "arguments": {"a": "<tool_call>{}"}}</tool_call>',
        [("weather", ARGUMENTS)],
    ),
    "a mark of each": (
        f'[TOOL_CALLS]{CALL}[TOOL_CALLS]{{"name": "clock", "arguments": {{}}}}',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "a list in a tag": (
        f'<tool_call>[{CALL}, {{"name": "clock", "arguments": {{}}}}]</tool_call>',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "a brace that is missing": (
        f'<tool_call>\n{CALL[:-1]}\n</tool_call>\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "a brace that is missing in a list": (
        f'[TOOL_CALLS][{CALL[:-1]}, {{"name": "clock", "arguments": {{}}}}]',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "no JSON, then a call": (
        f"<tool_call>{{'name': 'clock'</tool_call> <tool_call>{CALL}",
        "<tool_call>{'name': 'clock'</tool_call>",
        [("weather", ARGUMENTS)],
    ),
    "a name alone, broken": (
        '<tool_call>{"name": "clock" or so}</tool_call>',
        '<tool_call>{"name": "clock" or so}</tool_call>',
        [],
    ),
    "escapes that are no character": (
        '<tool_call>{"name": "clock", "arguments": "\\ud800"}',
        "",
        [("clock", '"\\ud800"')],
    ),
    "list that is none": ("[1, 2] are numbers", "[1, 2] are numbers", []),
}


def streamed(reader, text, cuts):
    """The deltas of a text that comes in pieces, put together as a client does."""
    delta, reading, content, reasoning, calls = Delta(), Reading(reader), "", "", []
    for cut in cuts:
        parts = reading.read(text[:cut], finished=cut == cuts[-1])
        assert parts == reader.read(text[:cut], finished=cut == cuts[-1])
        new = delta.advance(parts)
        content += new.get("content", "")
        reasoning += new.get("reasoning_content", "")
        for call in new.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"].isalnum() and len(call["id"]) == 9
                calls.append((call["function"]["name"], ""))
            name, before = calls[call["index"]]
            calls[call["index"]] = (name, before + call["function"]["arguments"])
    return reasoning, content, calls


def random_cuts(text):
    rng = np.random.default_rng()
    return [*sorted(rng.integers(0, len(text) + 1, rng.integers(0, 12)).tolist()), len(text)]


@pytest.mark.parametrize("name", TEXTS)
def test_calls_of_all_families(name):
    text, content, calls = TEXTS[name]
    reader = Reader({name: {} for name in ("weather", "clock", "clock_all")})
    for cuts in ([len(text)], range(1, len(text) + 1), random_cuts(text), random_cuts(text)):
        assert streamed(reader, text, list(cuts)) == ("", content, calls)


def test_any_text_streams_as_it_is_read_whole():
    """Random pieces of what calls and reasoning are made of."""
    rng = np.random.default_rng()
    pieces = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        CALL,
        '{"name": "clock"',
        ', "arguments": {',
        "}",
        "{",
    ]
    pieces += [
        "[TOOL_CALLS]",
        "[",
        "]",
        " ",
        "\n",
        "text",
        '"',
        "\\",
        ",",
        "<",
        "<|python_tag|>",
        ";",
        '"name": "weather"',
        "weather",
        "clock.call",
        "[ARGS]",
        "[CALL_ID]",
        "(",
        ")",
        "city='a'",
    ]
    for _ in range(3000):
        text = "".join(rng.choice(pieces, rng.integers(1, 8)))
        reader = Reader(
            {name: {} for name in ("weather", "clock")} if rng.random() < 0.8 else {}, inside=rng.random() < 0.3
        )
        whole = reader.read(text, finished=True)
        expected = (whole.reasoning, whole.content, [(call.name, call.arguments) for call in whole.calls])
        assert streamed(reader, text, list(range(1, len(text) + 1))) == expected, text
        assert streamed(reader, text, random_cuts(text)) == expected, text


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nso\n</think>\n\nIt is.", False, "so", "It is."),
        ("so\n</think>\nIt is.", True, "so", "It is."),
        ("so it goes on <", True, "so it goes on <", ""),
        ("no </think> here", False, "", "no </think> here"),
        ("<thin air", False, "", "<thin air"),
        ("[THINK]so</think>[/THINK]It is.", False, "so</think>", "It is."),
        ("so[/THINK]It is.", True, "so", "It is."),
        ("<seed:think>so</seed:think>It is.", False, "so", "It is."),
        ("so </seed:thin", True, "so </seed:thin", ""),
        ("<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>It is.<|END_RESPONSE|>", False, "so", "It is."),
        ("\n<|START_RESPONSE|> It <|is.<|END_RESP", False, "", " It <|is.<|END_RESP"),
        ("<|START_RESPON", False, "", "<|START_RESPON"),
        ("so<|END_THINKING|>It<|END_RESPONSE|>", True, "so", "It<|END_RESPONSE|>"),
        ("[1, 2]", False, "", "[1, 2]"),
        ("[THIN", False, "", "[THIN"),
    ],
)
def test_reasoning(text, inside, reasoning, content):
    for cuts in ([len(text)], range(1, len(text) + 1), random_cuts(text)):
        assert streamed(Reader(inside=inside), text, list(cuts)) == (reasoning, content, [])


class Counted:
    """A pattern that counts the characters it goes over."""

    def __init__(self, pattern, counts):
        self._pattern, self._counts = pattern, counts

    def match(self, text, at=0):
        found = self._pattern.match(text, at)
        self._counts.append(found.end() - at if found else 0)
        return found

    def search(self, text, at=0):
        found = self._pattern.search(text, at)
        self._counts.append((found.end() if found else len(text)) - at)
        return found

    def sub(self, put, text):
        self._counts.append(len(text))
        return self._pattern.sub(put, text)

    def finditer(self, text, at=0):
        for found in self._pattern.finditer(text, at):
            self._counts.append(found.end() - found.start())
            yield found


@pytest.fixture
def counts(monkeypatch):
    """Characters that each use of a pattern goes over."""
    counts = []
    for name, module in list(sys.modules.items()):
        if name.startswith("engine.answers."):
            for key, value in list(vars(module).items()):
                if isinstance(value, re.Pattern):
                    monkeypatch.setattr(module, key, Counted(value, counts))
    return counts


@pytest.mark.parametrize("begin", ["<tool_call>\n", "[TOOL_CALLS] [", "", "<think>so</think>"])
def test_what_has_been_read_of_a_call_is_not_read_again(counts, begin):
    listed = ", ".join(f'{{"key {n}": [{n}, "\\"text {n}\\"", null]}}' for n in range(700))
    members = ", ".join(f'"{n}": {n}' for n in range(700))
    text = f'{begin}{{"name": "weather", {members}, "arguments": {{"list": [{listed}], "text": "{"x" * 10000}"}}}}'
    assert json.loads(last_call(text).arguments)["text"] == "x" * 10000
    assert sum(counts) < 10 * len(text)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("[TOOL_CALLS]weather[ARGS]{", "}"),
        ("<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{", "}"),
        ("<|python_tag|>weather.call(", ")"),
        ("[weather(", ")]"),
    ],
)
def test_what_has_been_read_of_a_call_by_name_is_not_read_again(counts, begin, end):
    colon = ":" if begin.endswith("{") else "="
    key = (lambda name: f'"{name}"') if begin.endswith("{") else str
    members = ", ".join(f'{key(f"m{n}")}{colon} {{"a": [{n}, "\\"{n}"]}}' for n in range(700))
    text = f'{begin}{members}, {key("text")}{colon} "{"x" * 10000}"{end}'
    found = json.loads(last_call(text).arguments)
    assert found["text"] == "x" * 10000 and found["m699"] == {"a": [699, '"699']}
    assert sum(counts) < 10 * len(text)


def last_call(text):
    """Of an answer that comes in pieces."""
    chat = Chat(None, None, Reader({"weather": {}}), 0)
    for cut in range(0, len(text), 8):
        chat.parts(CompletionOutput(0, text[:cut], (), None, None))
    return chat.parts(CompletionOutput(0, text, (), None, None, "stop")).calls[-1]
