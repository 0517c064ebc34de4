"""OpenAI's own client against a real server: what it asks for is what it gets, streamed or whole."""

from __future__ import annotations

import json
import math
import queue
import shutil
import string

import numpy as np
import openai
import pytest
import tiny_models

from engine import SamplingParams
from engine.serve.logprobs import TextOffsets, text_logprobs, token_text

HELLO = [{"role": "user", "content": "Hello, who is there?"}]


def chat(running, **fields):
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 24} | fields
    return running.openai.chat.completions.create(**given)


def streamed(chunks):
    """Text, finish reasons, by choice, and the last usage of a stream."""
    texts, reasons, usage = {}, {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def random_text(rng):
    return "".join(chr(c) for c in rng.choice([*range(97, 123), 32, 10, 0xE9, 0x6771, 0x1F642], rng.integers(1, 40)))


def test_streams_give_the_same_text_as_whole_answers(running):
    rng = np.random.default_rng()
    for _ in range(15):
        fields = {
            "messages": [{"role": "user", "content": random_text(rng)}],
            "seed": int(rng.integers(2**32)),
            "n": int(rng.integers(1, 4)),
            "max_tokens": int(rng.integers(1, 30)),
            "temperature": float(rng.choice([0, 0.7, 3])),
            "stop": [str(rng.choice(list("abcdexyzABC"))) for _ in range(rng.integers(0, 3))] or None,
        }
        whole = chat(running, **fields)
        texts, reasons, usage = streamed(chat(running, **fields, stream=True, stream_options={"include_usage": True}))
        assert texts == {c.index: c.message.content for c in whole.choices}
        assert reasons == {c.index: c.finish_reason for c in whole.choices}
        assert usage.completion_tokens == whole.usage.completion_tokens


def test_plain_completions_stream_whole_characters(running):
    """A random model without stops writes bytes of all kinds: what comes is what decoding them together gives."""
    rng = np.random.default_rng()
    for _ in range(8):
        fields = {
            "model": "tiny",
            "prompt": [random_text(rng), random_text(rng)],
            "seed": int(rng.integers(2**32)),
            "max_tokens": 40,
            "temperature": 5.0,
            "n": 2,
        }
        whole = running.openai.completions.create(**fields)
        texts, _, _ = streamed(running.openai.completions.create(**fields, stream=True))
        assert texts == {c.index: c.text for c in whole.choices}
        assert len(texts) == 4


def test_the_server_gives_the_tokens_of_the_engine(running):
    """Over HTTP and in a batch, the text is that of the request alone."""
    seeds = [int(s) for s in np.random.default_rng().integers(0, 2**32, 6)]
    streams = [chat(running, seed=s, temperature=2.0, stream=True, max_tokens=30) for s in seeds]
    together = [streamed(stream)[0][0] for stream in streams]
    alone = [chat(running, seed=s, temperature=2.0, max_tokens=30).choices[0].message.content for s in seeds]
    assert together == alone
    assert len(set(together)) > 1


def test_stop_strings_end_the_text_across_tokens(running):
    """Letters come one a token: a stop of three of them lies across three."""
    text = chat(running, temperature=0, max_tokens=40).choices[0].message.content
    stop = text[9:12]
    answer = chat(running, temperature=0, max_tokens=40, stop=stop)
    assert answer.choices[0].message.content == text[: text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"
    texts, reasons, _ = streamed(chat(running, temperature=0, max_tokens=40, stop=[stop, "\n\n"], stream=True))
    assert (texts[0], reasons[0]) == (text[: text.find(stop)], "stop")


def test_usage_counts_cached_tokens(running):
    fields = {
        "messages": [{"role": "user", "content": random_text(np.random.default_rng()) + "x" * 80}],
        "max_tokens": 4,
    }
    first, second = chat(running, **fields).usage, chat(running, **fields).usage
    assert first.total_tokens == first.prompt_tokens + first.completion_tokens
    assert first.completion_tokens == 4
    assert second.prompt_tokens_details.cached_tokens == (second.prompt_tokens - 1) // 16 * 16
    salted = chat(running, **fields, extra_body={"cache_salt": "other"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_logprobs_are_those_of_the_engine(running):
    answer = chat(running, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in found) == answer.choices[0].message.content
    for entry in found:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob == max(best.logprob for best in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3 and sum(math.exp(best.logprob) for best in entry.top_logprobs) < 1.0001
    chunks = list(chat(running, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3, stream=True))
    pieces = [entry for c in chunks for choice in c.choices if choice.logprobs for entry in choice.logprobs.content]
    assert pieces == found


@pytest.mark.parametrize("best", [0, 2])
def test_what_was_drawn_is_among_the_best_of_a_plain_completion(running, best):
    fields = {"prompt": "Hello, all", "max_tokens": 8, "temperature": 5.0, "seed": 3, "echo": True, "logprobs": best}
    found = running.openai.completions.create(model="tiny", **fields).choices[0].logprobs
    rows = list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]
    assert all(top[token] == logprob and len(top) <= best + 1 for token, logprob, top in rows)
    assert any(min(top.values()) == logprob and len(top) == best + 1 for _, logprob, top in rows)


def test_several_tokens_of_one_text(running):
    """The best of them, unless another was drawn."""
    tokenizer = running.engine.tokenizer
    texts = [token_text(tokenizer, token) for token in range(tiny_models.VOCAB)]
    one, two, *_ = (token for token, text in enumerate(texts) if text == "\ufffd")
    other = texts.index("a")
    logprobs = {one: -1.0, two: -2.0, other: -3.0}
    for drawn, expected in ((other, -1.0), (one, -1.0), (two, -2.0)):
        offsets = TextOffsets(tokenizer, skip_special=True, continuation=True)
        [top] = text_logprobs(tokenizer, [drawn], [logprobs], 2, offsets)["top_logprobs"]
        assert top == {"\ufffd": expected} | ({"a": -3.0} if drawn == other else {})


def test_bias_penalties_and_min_p_reach_the_sampler(running):
    engine = running.engine
    letter = engine.tokenizer.token_id("Q")
    answer = chat(running, logit_bias={str(letter): 1e6}, max_tokens=5)
    assert answer.choices[0].message.content == "QQQQQ"
    fields = {"temperature": 1.3, "frequency_penalty": 2.0, "presence_penalty": 1.0, "seed": 7, "max_tokens": 30}
    extra = {"min_p": 0.02, "repetition_penalty": 1.2, "top_k": 40, "ignore_eos": True}
    over_http = chat(running, **fields, extra_body=extra).choices[0].message.content
    prompt = engine.encode(f"<user>{HELLO[0]['content']}<assistant>", add_special=False)
    outputs = queue.SimpleQueue()
    engine.submit(None, prompt, SamplingParams(**fields, **extra), outputs.put, stream=False)
    assert over_http == outputs.get(timeout=60).outputs[0].text


def test_echo_and_token_ids(running):
    ids = running.engine.encode("Once upon a time")
    by_text = running.openai.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=5, temperature=0, echo=True, logprobs=1
    ).choices[0]
    by_ids = running.openai.completions.create(
        model="tiny", prompt=list(ids), max_tokens=5, temperature=0, echo=True, logprobs=1
    ).choices[0]
    assert by_text.text.startswith("Once upon a time") and by_text == by_ids
    assert by_text.logprobs.token_logprobs[0] is None
    assert len(by_text.logprobs.tokens) == len(ids) + 5
    assert by_text.logprobs.text_offset == sorted(by_text.logprobs.text_offset)


def test_control_tokens_in_a_prompt(running):
    """They are read as such, echoed as they were written, and have their place in the text."""
    for prompt, before in (("Once</s>upon", 1), ("<s>Once</s>", 0)):
        fields = {"max_tokens": 0, "echo": True, "logprobs": 1}
        (choice,) = complete(running, prompt=prompt, **fields)["choices"]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert choice["text"] == prompt and tokens.count("<s>") == tokens.count("</s>") == 1
        for token, offset in list(zip(tokens, offsets, strict=True))[before:]:
            assert prompt[offset : offset + len(token)] == token
        (choice,) = complete(running, prompt=list(running.engine.encode(prompt)), **fields)["choices"]
        assert choice["text"] == prompt.replace("<s>", "").replace("</s>", "")
        assert choice["logprobs"]["text_offset"][-1] <= len(choice["text"])


def complete(running, **fields):
    response = running.http.post("/v1/completions", json={"model": "tiny", "max_tokens": 6} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_token_that_ends_the_text_is_scored(running):
    """Programs that score prompts drop the last token, which was generated: it must be there."""
    ids = list(running.engine.encode("Once upon"))
    (end,) = running.engine.encode("b")[-1:]
    fields = {"stop_token_ids": [end], "logit_bias": {str(end): 100}, "temperature": 0, "echo": True, "logprobs": 1}
    answer = complete(running, prompt=ids, **fields)
    (choice,) = answer["choices"]
    scored = choice["logprobs"]
    assert choice["finish_reason"] == "stop"
    assert len(scored["token_logprobs"]) == len(ids) + answer["usage"]["completion_tokens"]
    assert scored["text_offset"][-1] == len(choice["text"])  # it adds no text


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_an_answer(running, stream):
    prompts = ["Once upon a time", "and h\u00e9 said"]
    fields = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 2}
    if stream:
        chunks = running.openai.completions.create(model="tiny", stream=True, **fields)
        choices = [choice.model_dump() for chunk in chunks for choice in chunk.choices]
    else:
        answer = complete(running, **fields)
        choices = answer["choices"]
        assert answer["usage"]["completion_tokens"] == 0
    asked = sum(len(running.engine.encode(prompt)) for prompt in prompts)
    running.wait_until_logged(path="/v1/completions", prompt_tokens=asked, completion_tokens=0)
    assert sorted(choice["text"] for choice in choices) == sorted(prompts)
    for choice in choices:
        ids = running.engine.encode(choice["text"])
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids) and choice["finish_reason"] == "length"
    refused = running.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 0})
    assert refused.status_code == 400 and "max_tokens" in refused.json()["error"]["message"]


def test_usage_has_the_tokens_of_discarded_samples(running):
    fields = {"prompt": "a", "n": 2, "best_of": 5, "ignore_eos": True, "echo": True}
    assert complete(running, **fields, max_tokens=3)["usage"]["completion_tokens"] == 15
    running.wait_until_logged(completion_tokens=15)
    assert complete(running, **fields, max_tokens=0)["usage"]["completion_tokens"] == 0


def test_text_offsets_count_characters(running):
    """Each of the tokens that make up a character together begins where the character does."""
    said = "\u00e9\u6771\U0001f642"
    fields = {"structured_outputs": {"choice": [said]}, "max_tokens": 30, "logprobs": 0, "echo": True}
    (choice,) = complete(running, prompt="h\u00e9 ", **fields)["choices"]
    assert choice["text"] == "h\u00e9 " + said
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert any("\ufffd" in token for token in tokens), "no character was of several tokens"
    assert set(offsets) == set(range(len(choice["text"]))) and offsets == sorted(offsets)


def test_a_character_that_is_cut_is_left_out(running):
    """Of four bytes, each a token, max_tokens lets some come: they are no text."""
    form = {"structured_outputs": {"choice": ["\U0001f642"]}}
    whole = complete(running, prompt="a", max_tokens=30, **form)
    assert whole["choices"][0]["text"] == "\U0001f642"
    for count in range(1, whole["usage"]["completion_tokens"] - 1):
        (choice,) = complete(running, prompt="a", max_tokens=count, **form)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")


def test_more_prompts_than_may_run_take_turns(running):
    """As embeddings do: 64 sequences run, and a list may be longer."""
    capacity = next(iter(running.models.by_name.values())).admission.capacity
    prompts = [f"prompt {n}" for n in range(capacity + 20)]
    fields = {"prompt": prompts, "max_tokens": 3, "temperature": 0, "n": 2}
    answer = complete(running, **fields)
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    assert len(texts) == 2 * len(prompts) and answer["usage"]["completion_tokens"] == 3 * len(texts)
    for n in (0, len(prompts) - 1):
        alone = complete(running, **fields | {"prompt": prompts[n], "n": 1})["choices"][0]["text"]
        assert texts[2 * n : 2 * n + 2] == [alone, alone]
    running.wait_until_free()


def test_turns_within_a_list_do_not_wait_for_a_slow_reader_nor_others_for_them(running):
    """Its place is given back when the engine is done with the last of its prompts, and is half of all meanwhile."""
    capacity = next(iter(running.models.by_name.values())).admission.capacity
    prompts = [f"prompt {n}" for n in range(capacity + 20)]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 3, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body) as response:
        assert complete(running, prompt="another")["choices"], "nobody else had a place"
        running.wait_until_free()
        assert sum(b"finish_reason" in line.encode() for line in response.iter_lines()) >= len(prompts)


def test_forms(running):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    answer = chat(running, response_format=wanted, max_tokens=100)
    assert json.loads(answer.choices[0].message.content)["name"] in ("fox", "dog")
    assert answer.choices[0].finish_reason == "stop"
    texts, _, _ = streamed(chat(running, response_format=wanted, max_tokens=100, stream=True))
    assert set(json.loads(texts[0])) == {"name", "legs"}
    number = chat(running, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-c]"}})
    assert len(number.choices[0].message.content) == 5
    choice = chat(running, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert choice.choices[0].message.content in ("yes", "no")
    lark = chat(running, extra_body={"structured_outputs": {"grammar": 'start: "a" ("b" | "c") "d"'}})
    assert lark.choices[0].message.content in ("abd", "acd")
    anything = chat(running, response_format={"type": "json_object"}, max_tokens=200, seed=1)
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content), dict)


def test_models_tokens_and_version(running):
    model = running.openai.models.list().data[0]
    assert (model.id, model.max_model_len) == ("tiny", 1024)
    assert running.openai.models.retrieve("tiny").id == "tiny"
    text = "naïve 東京 🙂"
    with running.http as http:
        found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert found["tokens"] == list(running.engine.encode(text)) and found["count"] == len(found["token_strs"])
        assert http.post("/detokenize", json={"tokens": found["tokens"][1:]}).json() == {"prompt": text}
        rendered = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
        assert running.engine.tokenizer.decode(rendered) == f"<user>{HELLO[0]['content']}<assistant>"
        whole = http.post("/tokenize", json={"messages": HELLO, "add_special_tokens": True}).json()["tokens"]
        assert whole == [running.engine.tokenizer.bos_id, *rendered]
        plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": None, "tools": None}).json()
        assert plain["tokens"] == found["tokens"] and plain["token_strs"] is None
        assert http.get("/version").json()["version"]
        assert http.get("/openapi.json").json()["paths"]["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("chat_template_kwargs", {}),
    ],
)
def test_a_text_is_tokenized_without_what_chats_have(running, name, value):
    with running.http as http:
        answer = http.post("/tokenize", json={"prompt": "x", name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_no_message_is_continued(running):
    with running.http as http:
        answer = http.post("/tokenize", json={"messages": [], "continue_final_message": True})
    assert answer.status_code == 400 and "end with one" in answer.json()["error"]["message"]


def test_an_answer_without_a_most_may_have_a_least(running):
    letters = [*string.ascii_letters]
    answer = chat(running, max_tokens=openai.omit, temperature=0, stop=letters, extra_body={"min_tokens": 40})
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 41


REFUSED = {
    "unknown_field": ({"extra_body": {"wonders": 1}}, "wonders"),
    "nested_unknown_field": (
        {"extra_body": {"stream_options": {"wonders": 1}, "stream": True}},
        "stream_options.wonders",
    ),
    "temperature": ({"temperature": 200}, "temperature"),
    "negative_count": ({"n": -1}, "n"),
    "too_many": ({"n": 1000}, "n"),
    "wrong_type": ({"extra_body": {"seed": "x"}}, "seed"),
    "bias_key": ({"extra_body": {"logit_bias": {"x": 1}}}, "logit_bias"),
    "bias_id": ({"logit_bias": {"99999": 1}}, None),
    "top_logprobs_alone": ({"top_logprobs": 2}, "top_logprobs"),
    "tools_without_a_place": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "choice_without_tools": ({"tool_choice": "required"}, "tool_choice"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
    "template": ({"messages": [{"role": "user", "content": "forbidden"}]}, None),
    "too_long": ({"messages": [{"role": "user", "content": "x" * 3000}]}, None),
    "too_many_tokens": ({"max_tokens": 5000}, None),
    "regex": ({"extra_body": {"structured_outputs": {"regex": "("}}}, None),
    "huge_regex": ({"extra_body": {"structured_outputs": {"regex": "a" * 200_000}}}, "structured_outputs.regex"),
    "two_forms": ({"extra_body": {"structured_outputs": {"regex": "a", "json_object": True}}}, None),
    "priority": ({"extra_body": {"priority": 5}}, "priority"),
    "no_messages": ({"messages": []}, "messages"),
    "reserved": ({"extra_body": {"chat_template_kwargs": {"messages": 1}}}, "chat_template_kwargs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_requests_get_400_and_the_field(running, name):
    fields, param = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as refused:
        chat(running, **fields)
    error = refused.value.body
    assert error["type"] == "invalid_request_error" and error["message"].endswith(".")
    if param is not None:
        assert error["param"] == param
    assert chat(running, max_tokens=1).choices[0].finish_reason == "length"


def test_a_model_that_is_not_there(running):
    with pytest.raises(openai.NotFoundError, match="served here: tiny"):
        chat(running, model="other")


def test_reasoning_is_split_off(start, tmp_path):
    """The template opens a block, which a grammar-free answer of letters never closes: it is all reasoning."""
    folder = tiny_models.write_talker(tmp_path, tiny_models.TEMPLATE.replace("<assistant>", "<assistant><think>\n"))
    running = start(model=folder)
    message = chat(running, temperature=0, max_tokens=12).choices[0].message
    assert message.content == "" and len(message.reasoning_content) == 12
    chunks = chat(running, temperature=0, max_tokens=12, stream=True)
    pieces = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in pieces) == message.reasoning_content
    assert not any(d.content for d in pieces)


def test_what_is_not_said_is_as_the_makers_recommend(start, talker, tmp_path):
    folder = tmp_path / "greedy"
    shutil.copytree(talker, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.0}')
    client = start(model=folder).openai

    def said(**options) -> str:
        talk = [{"role": "user", "content": "hello"}]
        return (
            client.chat.completions.create(model="tiny", messages=talk, max_tokens=12, **options)
            .choices[0]
            .message.content
        )

    assert len({said(seed=seed) for seed in range(3)} | {said(temperature=0)}) == 1
    assert len({said(seed=seed, temperature=1.5) for seed in range(3)}) > 1
