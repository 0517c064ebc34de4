"""Calls of a model in the chat's own process."""

from __future__ import annotations

from contextlib import contextmanager

import tiny_models

from engine import LLM
from engine.chat.answer import Ask
from engine.chat.conversation import Conversation, Message, ToolCall
from engine.chat.local import Local

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@contextmanager
def writing(folder, marked):
    """Tools to the answer of a model that writes the tokens of ``marked`` once each, in order."""
    llm = LLM(tiny_models.write_marking(folder, marked))
    source = Local(llm, folder)
    ids = [llm.engine.tokenizer.token_id(text) for text in marked]
    bias = {token: 100 - place for place, token in enumerate(ids)}
    options = {"logit_bias": bias, "temperature": 0, "max_tokens": len(ids), "no_repeat_ngram_size": 1}

    def said(tools):
        *_, last = source.answer(Ask([{"role": "user", "content": "Hm?"}], options, tools=tools), lambda read, of: None)
        return last

    try:
        yield said
    finally:
        source.close()


def test_a_mark_that_is_a_special_token(tmp_path):
    """With tools it is read, as the server does it; without them it is not shown."""
    with writing(tmp_path, tiny_models.MARKED) as said:
        answer = said([WEATHER])
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", '{"city": "a"}')]
        assert (answer.shown, answer.text) == ("I look.", "I look.")  # the template shows its calls
        assert said([]).text == "".join(text for text, special in tiny_models.MARKED.items() if not special)


def test_thoughts_before_a_call_are_kept(tmp_path):
    marked = {"<think>": False, "I need it.": False, "</think>": False, "\n\nI look. ": False}
    call = {"<tool_call>": False, '{"name": "weather", "arguments": {"city": "a"}}': False, "</tool_call>": False}
    with writing(tmp_path, marked | call) as said:
        answer = said([WEATHER])
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", '{"city": "a"}')]
        assert (answer.reasoning, answer.shown, answer.text) == ("I need it.", "I look.", "".join(marked).rstrip())


def test_harmony(tmp_path):
    """Its marks are read with tools or without, and not kept."""
    with writing(tmp_path, tiny_models.HARMONY) as said:
        answer = said([WEATHER])
        assert (answer.reasoning, answer.shown, answer.text) == ("I need it.", "", "")
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", '{"city": "a"}')]
        plain = said([])
        assert (plain.reasoning, plain.shown, plain.text) == ("I need it.", '{"city": "a"}', '{"city": "a"}')


def test_a_call_that_the_model_has_named(tmp_path):
    """As Kimi K2's are, whose template needs the name again."""
    marked = {
        "<|tool_call_begin|>": True,
        "functions.weather:7": False,
        "<|tool_call_argument_begin|>": True,
        "{}": False,
    }
    with writing(tmp_path, marked) as said:
        [call] = said([WEATHER]).tool_calls
        assert (call.id, call.name, call.arguments) == ("functions.weather:7", "weather", "{}")


def test_thoughts_before_a_call_go_back(tmp_path):
    """Where they are apart from the text, as gpt-oss's; its template shows them until the turn has ended."""
    shown = (
        "{% if m.tool_calls %}({{ m.thinking }})[{{ m.tool_calls[0].function.arguments.city }}]{% endif %}{% endfor %}"
    )
    template = tiny_models.TEMPLATE.replace("{% endfor %}", shown)
    folder = tiny_models.write_marking(tmp_path, tiny_models.HARMONY, template)
    source = Local(LLM(folder), folder)
    call = ToolCall("call00000", "weather", '{"city": "a"}')
    made = Message("assistant", "", "I need it.", (call,))
    talk = Conversation(messages=[Message("user", "Hm?"), made, Message("tool", "Sun.", tool_call_id=call.id)])
    try:
        prompt, *_ = source.exact(Ask(talk.sent(), {}))
    finally:
        source.close()
    assert prompt == "<user>Hm?<assistant>(I need it.)[a]<tool>Sun.<assistant>"
