"""Answers in the harmony format: what streams adds up to the whole, and each message is what its header says."""

from __future__ import annotations

import re

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from engine.answers import HarmonyReading, PartialCall, Reader, Reading
from engine.serve.blocks import Blocks, blocks

CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "a <b"}'
TURNED = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "b"}'
FINAL = "<|start|>assistant<|channel|>final<|message|>It is <b>warm</b>."
THOUGHT = "<|channel|>analysis<|message|>I need\nit. <|end|>"
A, B = PartialCall("weather", '{"city": "a <b"}'), PartialCall("weather", '{"city": "b"}')
WARM = "It is <b>warm</b>."
ANSWERS = {
    "final alone": (FINAL.removeprefix("<|start|>assistant"), "", WARM, ()),
    "thought": (THOUGHT + FINAL, "I need\nit.", WARM, ()),
    "ended": (THOUGHT + FINAL + "<|return|>", "I need\nit.", WARM, ()),
    "thought twice": (THOUGHT + "<|start|>assistant" + THOUGHT + FINAL, "I need\nit. \n\nI need\nit.", WARM, ()),
    "call": (f"{THOUGHT}<|start|>assistant{CALL}<|call|>", "I need\nit.", "", (A,)),
    "named in the role": (THOUGHT + TURNED, "I need\nit.", "", (B,)),
    "two calls": (f"{CALL}<|call|>{TURNED}<|call|>", "", "", (A, B)),
    "said before": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>",
        "",
        "I look.",
        (A,),
    ),
    "unknown tool": ("<|channel|>commentary to=browser.open json<|message|>{}<|call|>", "", "{}", ()),
    "cut header": (THOUGHT + "<|start|>assistant<|channel|>fi", "I need\nit.", "", ()),
    "cut mark": (FINAL.removeprefix("<|start|>assistant") + "<|en", "", WARM + "<|en", ()),
    "no header": ("<b>Hi</b> to=all", "", "<b>Hi</b> to=all", ()),
    "no header, ended": ("total<|end|>", "", "total", ()),
    "nothing": ("", "", "", ()),
    "a bracket": ("<", "", "<", ()),
}


def grown(text, cuts):
    """What comes last of a text that grows, all of which only ever grows."""
    reading, before = HarmonyReading({"weather": {}}), ("", "", ())
    for cut in cuts:
        found = reading.read(text[:cut], finished=False)
        assert found[0].startswith(before[0].rstrip()) and found[1].startswith(before[1])
        assert all(now.arguments.startswith(old.arguments) for now, old in zip(found[2], before[2], strict=False))
        assert len(found[2]) >= len(before[2])
        before = found
    return reading.read(text, finished=True)


@pytest.mark.parametrize("name", ANSWERS)
@given(data=st.data())
def test_messages_are_what_their_headers_say(name, data):
    text, *want = ANSWERS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert list(grown(text, cuts)) == list(grown(text, range(len(text)))) == want


@given(
    st.lists(st.sampled_from([*re.findall(r"<\|\w+\|>|\w+|\W", CALL + TURNED + FINAL), "<|end|>", "<|call|>", " <"]))
)
def test_any_text_streams_as_it_is_read_whole(pieces):
    text = "".join(pieces)
    assert grown(text, range(len(text))) == HarmonyReading({"weather": {}}).read(text, finished=True)


LOOKING = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
ORDERED = {
    "said before it is thought": (
        LOOKING + THOUGHT + CALL,
        [("text", "I look."), ("reasoning", "I need\nit."), ("call", A)],
    ),
    "thought again": (
        THOUGHT + LOOKING + THOUGHT + FINAL,
        [("reasoning", "I need\nit."), ("text", "I look."), ("reasoning", "I need\nit."), ("text", WARM)],
    ),
    "said after it": (CALL + "<|call|>" + FINAL, [("call", A), ("text", WARM)]),
    "thought alone": (THOUGHT, [("reasoning", "I need\nit."), ("text", "")]),
    "nothing": ("", [("text", "")]),
}


def streamed(text, one_call=False):
    """The blocks of an answer that comes a character at a time, none of which has anything once it has ended."""
    state, reading, ended = Blocks(), Reading(Reader({"weather": {}}, harmony=True, one_call=one_call)), set()
    texts: dict[int, str] = {}
    for end in range(len(text) + 1):
        finished = end == len(text)
        for step, block, new in state.advance(reading.read(text[:end], finished), finished):
            assert block.index not in ended
            texts[block.index] = texts.get(block.index, "") + new
            ended |= {block.index} if step == "stop" else set()
    assert [block.text for block in state.blocks] == list(texts.values()) and ended == set(texts)
    return [(block.kind, block.name, block.text) for block in state.blocks]


@pytest.mark.parametrize("name", ORDERED)
def test_blocks_are_in_the_order_of_messages(name):
    text, want = ORDERED[name]
    calls = [(kind, said.name, said.arguments) if kind == "call" else (kind, "", said) for kind, said in want]
    assert streamed(text) == calls


@given(st.lists(st.sampled_from([CALL, TURNED, FINAL, THOUGHT, LOOKING, "<|end|>", "<|start|>", " x "])), st.booleans())
def test_any_messages_stream_as_the_blocks_of_the_whole(pieces, one_call):
    text = "".join(pieces)
    whole = blocks(Reading(Reader({"weather": {}}, harmony=True, one_call=one_call)).read(text, finished=True))
    assert streamed(text, one_call) == [(block.kind, block.name, block.text) for block in whole]


def test_no_more_calls_than_are_wanted():
    reading = Reading(Reader({"weather": {}}, one_call=True, harmony=True))
    assert reading.read(CALL + TURNED, finished=True).calls == (A,)


@pytest.fixture(scope="module")
def harmony(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harmony")
    return start(model=tiny_models.write_marking(folder, tiny_models.HARMONY))


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_whose_marks_are_special_tokens(harmony, stream):
    """As gpt-oss's: they are read, and not shown."""
    tokens = [harmony.engine.tokenizer.token_id(text) for text in tiny_models.HARMONY]
    bias = {str(token): 100 - place for place, token in enumerate(tokens)}
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    answer = harmony.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hm?"}],
        tools=[weather],
        logit_bias=bias,
        temperature=0,
        max_tokens=len(tokens),
        stream=stream,
        extra_body={"no_repeat_ngram_size": 1},
    )
    pieces = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == "I need it."
    assert not any(piece.content for piece in pieces)
    calls = [call.function for piece in pieces for call in piece.tool_calls or ()]
    assert "".join(call.name or "" for call in calls) == "weather"
    assert "".join(call.arguments or "" for call in calls) == '{"city": "a"}'


def prompted(harmony, **fields):
    answer = harmony.openai.chat.completions.create(model="tiny", max_tokens=4, **fields)
    return answer.usage.prompt_tokens


def test_what_is_content_alone_begins_in_its_channel(harmony):
    """A form, and an answer that is to go on: what is more is the header."""
    asked, begun = {"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Well"}
    header = len(harmony.engine.tokenizer.encode("<|channel|>final<|message|>", False, True))
    plain = prompted(harmony, messages=[asked])
    form = {"type": "json_object"}
    assert prompted(harmony, messages=[asked], response_format=form) == plain + header
    more = {"continue_final_message": True, "add_generation_prompt": False}
    word = len(harmony.engine.tokenizer.encode("Well", False))
    assert prompted(harmony, messages=[asked, begun], extra_body=more) == plain + header + word
