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
