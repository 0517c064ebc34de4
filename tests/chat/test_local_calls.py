"""Calls of a model in the chat's own process."""

from __future__ import annotations

import tiny_models

from engine import LLM
from engine.chat.answer import Ask
from engine.chat.local import Local

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_a_mark_that_is_a_special_token(tmp_path):
    """With tools it is read, as the server does it; without them it is not shown."""
    folder = tiny_models.write_marking(tmp_path)
    llm = LLM(folder)
    source = Local(llm, folder)
    ids = [llm.engine.tokenizer.token_id(text) for text in tiny_models.MARKED]
    bias = {token: 100 - place for place, token in enumerate(ids)}
    options = {"logit_bias": bias, "temperature": 0, "max_tokens": 3, "no_repeat_ngram_size": 1}

    def said(tools):
        *_, last = source.answer(Ask([{"role": "user", "content": "Hm?"}], options, tools=tools), lambda read, of: None)
        return last

    try:
        answer = said([WEATHER])
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", '{"city": "a"}')]
        assert said([]).text == tiny_models.MARKED[0] + tiny_models.MARKED[2]
    finally:
        source.close()
