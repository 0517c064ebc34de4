"""Calls in sections of marks of their own, DeepSeek's and Kimi K2's: read however the stream is cut, and given back to the model
by the ids that it gave them."""

from __future__ import annotations

import re

import pytest
import tiny_models
from growing import grown
from hypothesis import given
from hypothesis import strategies as st

from engine.answers import PartialCall, Parts, Reader
from engine.serve.blocks import blocks
from engine.serve.deltas import Delta
from engine.serve.ollama import _called

TOOLS = {"weather": {}, "function": {}, "weather_all": {}}
R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>".format
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>".format
K2 = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>".format


def deepseek(*calls):
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def kimi(*calls):
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


ARGUMENTS = '{"city": "a </｜tool▁sep｜>}"}'
CALL = PartialCall("weather", ARGUMENTS)
EMPTY = PartialCall("function", "{}")
TEXTS = {
    "R1": (f"I look.\n\n{deepseek(R1('weather', ARGUMENTS))}", "I look.", [CALL]),
    "R1, two": (deepseek(R1("weather", ARGUMENTS), "\n", R1("function", "{}")), "", [CALL, EMPTY]),
    "V3.1": (f"I look.{deepseek(V31('weather', ARGUMENTS))}", "I look.", [CALL]),
    "V3.1, two": (deepseek(V31("function", "{}"), V31("weather", ARGUMENTS)), "", [EMPTY, CALL]),
    "V3.1, on a line of its own": (deepseek(V31("weather", "\n" + ARGUMENTS + "\n")), "", [CALL]),
    "V3.1, without the section": (f"So {V31('weather', ARGUMENTS)}", "So", [CALL]),
    "V3.1, without the call's mark": (deepseek(f"weather<｜tool▁sep｜>{ARGUMENTS}"), "", [CALL]),
    "V3.1, cut": (V31("weather_all", '{"a": ').removesuffix("<｜tool▁call▁end｜>"), "", [PartialCall("weather_all", '{"a": ')]),
    "an unknown one before": (
        deepseek(V31("other", "{}"), V31("weather", ARGUMENTS)),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        [CALL],
    ),
    "marks in a text": ("<｜tool▁calls▁begin｜> weather <｜tool▁sep｜>", "<｜tool▁calls▁begin｜> weather <｜tool▁sep｜>", []),
    "a name alone": ("<｜tool▁call▁begin｜>weather", "<｜tool▁call▁begin｜>weather", []),
    "Kimi": (
        f"I look. {kimi(K2('functions.weather:3', ARGUMENTS), K2('functions.function:4 ', ' {}'))}",
        "I look.",
        [PartialCall("weather", ARGUMENTS, "functions.weather:3"), PartialCall("function", "{}", "functions.function:4")],
    ),
    "Kimi, by the name alone": (kimi(K2("weather:0", "{}")), "", [PartialCall("weather", "{}", "weather:0")]),
    "Kimi, without a section": (
        K2("functions.weather:0", "{}"),
        "",
        [PartialCall("weather", "{}", "functions.weather:0")],
    ),
    "Kimi, no number": (kimi("<|tool_call_begin|>functions.weather{}"), kimi("<|tool_call_begin|>functions.weather{}"), []),
    "Kimi, no arguments": (kimi(K2("functions.weather:0", "none")), kimi(K2("functions.weather:0", "none")), []),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_calls_are_read_as_they_were_written(name, data):
    text, content, calls = TEXTS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    for found in (grown(TOOLS, text, cuts), grown(TOOLS, text, range(len(text)))):
        assert (found.content, list(found.calls)) == (content, calls)


PIECES = re.findall(r"<[^>]*>|\w+|\W", R1("weather", ARGUMENTS) + V31("function", "") + K2("functions.weather:1", "[]"))
PIECES += ["<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>", "<｜tool", "weather_all"]


@given(st.lists(st.sampled_from(PIECES)))
def test_any_text_streams_as_it_is_read_whole(pieces):
    text = "".join(pieces)
    assert grown(TOOLS, text, range(len(text))) == Reader(TOOLS).read(text, finished=True)


WRITTEN = {
    "So.": False,
    "<|tool_calls_section_begin|>": True,
    "<|tool_call_begin|>": True,
    "functions.weather:7": False,
    "<|tool_call_argument_begin|>": True,
    '{"city": "a"}': False,
    "<|tool_call_end|>": True,
    "<|tool_calls_section_end|>": True,
}
SHOWN = (
    "{% for c in m.tool_calls or () %}{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + c.id }}"
    "{{ '<|tool_call_argument_begin|>' + c.function.arguments + '<|tool_call_end|><|tool_calls_section_end|>' }}"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def running(start, tmp_path_factory):
    template = tiny_models.TEMPLATE.replace("{% endfor %}", SHOWN)
    return start(model=tiny_models.write_marking(tmp_path_factory.mktemp("kimi"), WRITTEN, template))


def asked(running):
    tokens = [running.engine.tokenizer.token_id(text) for text in WRITTEN]
    bias = {str(token): 100 - place for place, token in enumerate(tokens)}
    fields = {"model": "tiny", "tools": [WEATHER], "temperature": 0, "max_tokens": len(tokens), "logit_bias": bias}
    return fields | {"messages": [{"role": "user", "content": "Hm?"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_gets_the_ids_back_that_it_gave(running, stream):
    once = {"no_repeat_ngram_size": 1}
    answer = running.openai.chat.completions.create(**asked(running), stream=stream, extra_body=once)
    if stream:
        pieces = [chunk.choices[0].delta for chunk in answer]
        calls = [call for piece in pieces for call in piece.tool_calls or ()]
        said = {"role": "assistant", "content": "".join(piece.content or "" for piece in pieces)}
        function = {"name": "weather", "arguments": "".join(call.function.arguments for call in calls)}
        said["tool_calls"] = [{"id": calls[0].id, "type": "function", "function": function}]
    else:
        said = answer.choices[0].message.model_dump(exclude_none=True)
    assert (said["content"], [call["id"] for call in said["tool_calls"]]) == ("So.", ["functions.weather:7"])
    result = {"role": "tool", "tool_call_id": "functions.weather:7", "content": "Sun."}
    messages = [{"role": "user", "content": "Hm?"}, said, result]
    with running.http as http:
        ids = http.post("/tokenize", json={"messages": messages, "tools": [WEATHER]}).json()["tokens"]
    shown = running.engine.tokenizer.decode(ids, skip_special=False)
    written = "".join(WRITTEN)
    assert f"<assistant>{written}<tool>Sun.(functions.weather:7)" in shown


def test_ids_tell_calls_apart():
    """Those that the model gave twice, too; blocks and deltas have them alike."""
    calls = tuple(PartialCall("weather", "{}", own) for own in ("weather:0", "weather:0", "weather:1", ""))
    parts = Parts(calls=calls)
    of_blocks = [block.id for block in blocks(parts)]
    of_deltas = [call["id"] for call in Delta().advance(parts)["tool_calls"]]
    for first, second, third, last in (of_blocks, of_deltas):
        assert (first, third) == ("weather:0", "weather:1")
        assert all(len(own) == 9 and own.isalnum() for own in (second, last))
    assert [_called(call).get("id") for call in calls[2:]] == ["weather:1", None]
