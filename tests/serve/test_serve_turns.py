"""Turns of a conversation over HTTP go on from what was generated, and only from one's own."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import tiny_models

from engine.serve.keys import load_keys

SETTINGS = {"model": "tiny", "temperature": 1.5, "max_tokens": 60, "extra_body": {"top_k": 8}}


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A random llama that writes letters and pairs of them, which tokenizing joins in other ways than it does."""
    return tiny_models.write_talker(tmp_path_factory.mktemp("writer"), letters=3)


@pytest.fixture(scope="module")
def running(start, writer):
    return start(model=writer)


def cached(usage):
    return usage.prompt_tokens_details.cached_tokens


def told(running, talk, client=None, **extra):
    """The conversation with an answer to it, and the ids that were generated, with those of the text where they differ."""
    client = client or running.openai
    rng = np.random.default_rng()
    tokenizer = running.engine.tokenizer
    while True:
        asked = [*talk, {"role": "user", "content": "Tell me " + "".join(rng.choice(list("abc "), 40))}]
        fields = {**SETTINGS, "extra_body": {"top_k": 8, **extra}}
        answer = client.chat.completions.create(messages=asked, **fields, logprobs=True)
        text = answer.choices[0].message.content
        tokens = [entry.token for entry in answer.choices[0].logprobs.content]
        if text == text.strip() and len(tokenizer.encode(text)) != len(tokens) == 60:
            return [*asked, {"role": "assistant", "content": text}], answer.usage


@pytest.mark.parametrize("stream", [False, True])
def test_the_cache_has_the_answers_of_all_turns(running, stream):
    talk = []
    before = None
    for _ in range(4):
        talk, usage = told(running, talk)
        if before is not None:  # whole blocks; the last token's KV is not there
            assert cached(usage) >= (before.prompt_tokens + before.completion_tokens - 1) // 16 * 16
        before = usage
    messages = [*talk, {"role": "user", "content": "more"}]
    with running.http as http:
        if stream:
            chunks = running.openai.chat.completions.create(
                messages=messages, **SETTINGS, stream=True, stream_options={"include_usage": True}
            )
            usage = [chunk for chunk in chunks if chunk.usage][-1].usage
        else:
            usage = running.openai.chat.completions.create(messages=messages, **SETTINGS).usage
        assert cached(usage) >= (before.prompt_tokens + before.completion_tokens - 1) // 16 * 16
        ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert len(ids) == usage.prompt_tokens
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text == "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
        assert ids != running.engine.tokenizer.encode(text, parse_special=True)
        counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": messages}).json()
        assert counted["input_tokens"] == usage.prompt_tokens


def test_whoever_leaves_an_answer_goes_on_from_what_came(running):
    """Stopped in the midst, a conversation goes on from the ids that were generated, and not from others that say the same."""
    tokenizer = running.engine.tokenizer
    fields = {**SETTINGS, "max_tokens": 900}  # which the server is far from when 40 have come
    had, asked = [], []
    while "".join(had) != "".join(had).strip() or len(tokenizer.encode("".join(had))) == len(had):
        asked = [{"role": "user", "content": "Tell me " + "".join(np.random.default_rng().choice(list("abc "), 40))}]
        had = []
        with running.openai.chat.completions.create(messages=asked, **fields, stream=True, logprobs=True) as chunks:
            for chunk in chunks:
                had += [entry.token for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
                if len(had) >= 40:
                    break
    more = [*asked, {"role": "assistant", "content": "".join(had)}, {"role": "user", "content": "more"}]

    def taken():
        ids = http.post("/tokenize", json={"messages": more}).json()["tokens"]
        return [tokenizer.decode([token]) for token in ids[before : before + len(had)]]

    with running.http as http:
        before = len(http.post("/tokenize", json={"messages": asked}).json()["tokens"])
        deadline = time.monotonic() + 10  # until the server has seen that nobody listens
        while taken() != had:
            assert time.monotonic() < deadline
    usage = running.openai.chat.completions.create(messages=more, **SETTINGS).usage
    assert cached(usage) >= (before + len(had) - 1) // 16 * 16


def test_another_protocol_goes_on_from_the_same_ids(running):
    talk, usage = told(running, [])
    body = {"model": "tiny", "messages": [*talk, {"role": "user", "content": "more"}], "max_tokens": 2}
    with running.http as http:
        found = http.post("/v1/messages", json=body).json()["usage"]
    assert found["cache_read_input_tokens"] >= (usage.prompt_tokens + usage.completion_tokens - 1) // 16 * 16


def test_an_answer_that_was_changed_is_tokenized(running):
    talk, _ = told(running, [])
    talk[-1]["content"] += "!"
    with running.http as http:
        ids = http.post("/tokenize", json={"messages": talk, "add_generation_prompt": False}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    # up to the change the answer may be as it was generated
    assert text == "".join(f"<{m['role']}>{m['content']}" for m in talk)
    talk[-1]["content"] = "x" + talk[-1]["content"]
    with running.http as http:
        ids = http.post("/tokenize", json={"messages": talk, "add_generation_prompt": False}).json()["tokens"]
    text = "".join(f"<{m['role']}>{m['content']}" for m in talk)
    assert ids == running.engine.tokenizer.encode(text, parse_special=True)


def test_nobody_gets_the_ids_of_others(start, writer):
    running = start(model=writer, keys=load_keys(None, {"ENGINE_SERVE_KEYS": "one two"}))
    one, two = (running.openai.with_options(api_key=key) for key in ("one", "two"))
    talk, _ = told(running, [], one)
    salted, _ = told(running, [], one, cache_salt="mine")
    text = "".join(f"<{m['role']}>{m['content']}" for m in talk)
    plain = running.engine.tokenizer.encode(text, parse_special=True)

    def ids(key, messages):
        with running.http as http:
            body = {"messages": messages, "add_generation_prompt": False}
            return http.post("/tokenize", json=body, headers={"authorization": f"Bearer {key}"}).json()["tokens"]

    assert ids("one", talk) != plain == ids("two", talk)
    other = "".join(f"<{m['role']}>{m['content']}" for m in salted)
    assert ids("one", salted) == running.engine.tokenizer.encode(other, parse_special=True)
    more = {"messages": [*salted, {"role": "user", "content": "more"}], **SETTINGS}
    mine = one.chat.completions.create(**{**more, "extra_body": {"top_k": 8, "cache_salt": "mine"}}).usage
    others = two.chat.completions.create(**more).usage
    assert cached(mine) > 0 == cached(others)
    assert mine.prompt_tokens != others.prompt_tokens
    assert "Tell me" not in json.dumps(running.logs)


CALLED = {"name": "weather", "arguments": '{"city": "ab"}'}
CALL = {"function": {"name": "weather", "arguments": {"city": "ab"}}}
ASKED = {"role": "user", "content": "Hm?"}
THOUGHTS = {
    "/v1/chat/completions": {
        "messages": [
            ASKED,
            {"role": "assistant", "reasoning_content": "So.", "tool_calls": [{"id": "i", "function": CALLED}]},
            {"role": "tool", "tool_call_id": "i", "content": "Sun."},
        ]
    },
    "/v1/responses": {
        "input": [
            ASKED,
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
            {"type": "function_call", "call_id": "i", **CALLED},
            {"type": "function_call_output", "call_id": "i", "output": "Sun."},
        ]
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "So.", "signature": ""},
                    {"type": "tool_use", "id": "i", "name": "weather", "input": {"city": "ab"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "Sun."}]},
        ],
    },
    "/api/chat": {
        "stream": False,
        "messages": [
            ASKED,
            {"role": "assistant", "thinking": "So.", "tool_calls": [CALL]},
            {"role": "tool", "tool_name": "weather", "content": "Sun."},
        ],
    },
}


@pytest.fixture(scope="module")
def thinking(start, tmp_path_factory):
    """Its template shows thoughts and calls."""
    shown = "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{% for c in m.tool_calls or () %}("
    template = tiny_models.TEMPLATE.replace("{{ m.content }}", shown + "{% endfor %}{{ m.content }}")
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("thinking"), template), max_model_len=128)


def tokens(http, text):
    return http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["count"]


@pytest.mark.parametrize("path", THOUGHTS)
def test_thoughts_go_back(thinking, path):
    """The template is given them by whatever name, as its model wants them between the calls of an answer."""
    with thinking.http as http:
        expected = tokens(http, "<user>Hm?<assistant>[So.](<tool>Sun.<assistant>")
        answer = http.post(path, json={"model": "tiny"} | THOUGHTS[path])
    assert answer.status_code == 200, answer.text
    found = answer.json()
    usage = found.get("usage", found)
    told = next(usage[name] for name in ("prompt_tokens", "input_tokens", "prompt_eval_count") if name in usage)
    assert told + usage.get("cache_read_input_tokens", 0) == expected


def test_thoughts_belong_to_what_follows_them(thinking):
    """In a list of items: to the answer, and to calls after it that have none of their own."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]}
    call, said = {"type": "function_call", "call_id": "i", **CALLED}, {"role": "assistant", "content": "Ah"}
    for items, shown in (
        ([thought, said, call, call], "<assistant>[So.]((Ah"),
        ([said, thought, call], "<assistant>Ah<assistant>[So.]("),
        ([thought, ASKED, said], "<user>Hm?<assistant>Ah"),
        ([{"type": "reasoning", "summary": []}, said], "<assistant>Ah"),
    ):
        with thinking.http as http:
            expected = tokens(http, f"{shown}<user>Hm?<assistant>")
            asked = {"model": "tiny", "input": [*items, ASKED], "max_output_tokens": 1}
            assert http.post("/v1/responses", json=asked).json()["usage"]["input_tokens"] == expected


@pytest.fixture(scope="module")
def strict(start, tmp_path_factory):
    """Its template wants ids as Mistral's do, of nine characters, and in each result that of a call by its name."""
    wanted = (
        "{% for c in m.tool_calls or () %}{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('call') }}"
        "{% endif %}{% set ns.ids = ns.ids + [c.id ~ c.function.name] %}{% endfor %}{% if m.role == 'tool' and "
        "m.tool_call_id ~ m.name|default('clock') not in ns.ids %}{{ raise_exception('result') }}{% endif %}{{ m.content }}"
    )
    template = "{% set ns = namespace(ids=[]) %}{% if tools %}tools{% endif %}"
    template += tiny_models.TEMPLATE.replace("{{ m.content }}", wanted)
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("strict"), template))


def test_ids_of_calls_come_back_as_templates_want_them(strict):
    """Anthropic's protocol has longer ones, and Ollama's none."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    asked = {"model": "tiny", "max_tokens": 90, "tools": [{"name": "clock", "input_schema": schema}]}
    function = {"type": "function", "function": {"name": "clock", "parameters": schema}}
    call = {"function": {"name": "clock", "arguments": {}}}
    other = {"function": {"name": "weather", "arguments": {}}}
    named = [{"role": "tool", "tool_name": name, "content": "12"} for name in ("clock", "weather", "clock")]
    plain = [{"role": "tool", "content": "12"}] * 2
    with strict.http as http:
        forced = asked | {"messages": [ASKED], "tool_choice": {"type": "any"}}
        [use] = http.post("/v1/messages", json=forced).json()["content"]
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "12"}]}
        told = [ASKED, {"role": "assistant", "content": [use]}, result]
        answers = [http.post("/v1/messages", json=asked | {"messages": told})]
        for calls, results in (
            ([[call, other], [call]], named),
            ([[other, call, call]], named),
            ([[call, call]], plain),
        ):
            told = [ASKED, *({"role": "assistant", "tool_calls": some} for some in calls), *results]
            options = {"num_predict": 2}
            body = {"model": "tiny", "messages": told, "tools": [function], "stream": False, "options": options}
            answers.append(http.post("/api/chat", json=body))
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
