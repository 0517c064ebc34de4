"""What is wrong is said in a sentence, and the field at fault is named as the request has it."""

from __future__ import annotations

import json
import re

import pytest
import tiny_models

U = [{"role": "user", "content": "a"}]
CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, EMBED = "/v1/messages", "/api/chat", "/v1/embeddings"
BAD = {"type": "strin"}
NOT_USED = "The grammar cannot be used: "
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}


def schema(given):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


def tool(given, **more):
    return {"type": "function", "function": {"name": "f", "parameters": given, **more}}


def part(given):
    return [{"role": "user", "content": [given]}]


REFUSED = [
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0; it must be an integer"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be an integer"),
    (CHAT, {"max_tokens": 100000}, "max_tokens", "100000 more are to be generated"),
    (CHAT, {"max_completion_tokens": 100000}, "max_completion_tokens", "100000 more are to be generated"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens",
     "max_completion_tokens is another name of max_tokens; leave one out."),
    (CHAT, {"messages": part({"type": "text", "text": "x" * 3000}), "max_tokens": 1}, "messages", "The prompt has 3"),
    (CHAT, {"min_tokens": 5000, "stream": True}, "min_tokens", "5000 more are to be generated"),
    (CHAT, {"min_tokens": 9, "max_tokens": 5}, "min_tokens", "min_tokens (9) is above max_tokens (5)"),
    (CHAT, {"top_logprobs": 33, "logprobs": True}, "top_logprobs", "top_logprobs is 33; it must be an integer from 0 to 32"),
    (CHAT, {"top_logprobs": -1, "logprobs": True}, "top_logprobs", "top_logprobs is -1; it must be an integer"),
    (CHAT, {"temperature": -1}, "temperature", "temperature is -1.0; it must be a number"),
    (CHAT, {"stop": ["a"] * 2000}, "stop", "The field stop is wrong: list should have at most 1024 items"),
    (CHAT, {"stop": [""]}, "stop", "Every stop string must be a text that is not empty."),
    (CHAT, {"stop": "x" * 2000}, "stop", "A stop string has 2000 characters"),
    (CHAT, {"stop": ["x" * 1000 + str(n) for n in range(9)]}, "stop", "The stop strings have 9009 characters"),
    (CHAT, {"stop": 5}, "stop", "The field stop is wrong: input should be a valid string."),
    (CHAT, {"logit_bias": {"5": 1e30}}, "logit_bias", "The logit bias of token 5 is 1e+30"),
    (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias", "The token id 99999 does not exist"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has the key 'x'"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids", "The token id -1 does not exist"),
    (CHAT, {"priority": 1}, "priority", "priority is for servers"),
    (CHAT, schema(BAD), "response_format", NOT_USED),
    (CHAT, schema({"type": "string", "pattern": "("}), "response_format", NOT_USED),
    (CHAT, schema({"type": "array", "uniqueItems": True}), "response_format", NOT_USED),
    (CHAT, schema({"enum": ["x" * 200_000]}), "response_format", "response_format has 2000"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
     "The field response_format.json_schema is missing."),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name",
     "The field response_format.json_schema.name is missing."),
    (CHAT, {"response_format": {"type": "foo"}}, "response_format.type",
     "The field response_format.type is wrong: input should be one of 'text', 'json_object', 'json_schema'."),
    (CHAT, {"response_format": {}}, "response_format.type", "The field response_format.type is missing."),
    (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", NOT_USED),
    (CHAT, {"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar", NOT_USED),
    (CHAT, {"structured_outputs": {"json": BAD}}, "structured_outputs.json", NOT_USED),
    (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "structured_outputs.json is no JSON schema"),
    (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "structured_outputs.choice must be a list"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs", "structured_outputs has nothing"),
    (CHAT, {"tools": [tool(BAD)], "tool_choice": "required"}, "tools", NOT_USED),
    (CHAT, {"tools": [tool(BAD, strict=True)]}, "tools", NOT_USED),
    (CHAT, {"tools": [tool(BAD)], **schema({"type": "object"})}, None, NOT_USED),
    (CHAT, {"tools": [tool(BAD)], "tool_choice": "none", **schema(BAD)}, "response_format", NOT_USED),
    (CHAT, {"tools": [tool({}, name="")]}, "tools.0.function.name", "at least 1 character"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "The field tool_choice.function is missing."),
    (CHAT, {"messages": part({"type": "image_url", "image_url": {"url": "x"}})}, "messages.0.content.0.image_url",
     "The field messages.0.content.0.image_url is not supported here."),
    (CHAT, {"metadata": {"a": 1}}, "metadata.a", "The field metadata.a is wrong: input should be a valid string."),
    (PLAIN, {"prompt": [99999]}, "prompt", "The token id 99999 does not exist"),
    (PLAIN, {"prompt": "x" * 3000}, "prompt", "The prompt has 3"),
    (PLAIN, {"prompt": [[5]] * 20000}, "prompt", "There are 20000 prompts; at most 1024 are taken."),
    (EMBED, {"input": [[5]] * 20000}, "input", "There are 20000 inputs; at most 2048 are taken."),
    (PLAIN, {"prompt": "a", "max_tokens": 100000}, "max_tokens", "100000 more are to be generated"),
    (PLAIN, {"prompt": "a", "logprobs": 40}, "logprobs", "logprobs is 40; it must be an integer"),
    (PLAIN, {"prompt": "a", "n": 2, "best_of": 1}, "best_of", "best_of (1) is below n (2)"),
    (PLAIN, {"prompt": "a", **schema(BAD)}, "response_format", NOT_USED),
    (PLAIN, {"prompt": "a", "structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar", NOT_USED),
    (PLAIN, {}, "prompt", "The field prompt is missing."),
    (EMBED, {"input": [5, 99999]}, "input", "The token id 99999 does not exist"),
    (EMBED, {"input": ["a", ""]}, "input", "input is empty; give a text or token ids to embed."),
    (EMBED, {"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0; it is a whole number"),
    (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; it must be an integer"),
    (RESPONSES, {"input": "a", "max_output_tokens": 100000}, "max_output_tokens", "100000 more are to be generated"),
    (RESPONSES, {"input": "x" * 3000, "max_output_tokens": 1}, "input", "The prompt has 3"),
    (RESPONSES, {"input": []}, "input", "The field input is wrong: list should have at least 1 item"),
    (RESPONSES, {"input": [{"type": "foo"}]}, "input.0.type",
     "The field input.0.type is wrong: input should be one of 'message', 'function_call', "),
    (RESPONSES, {"input": [5]}, "input.0", "The field input.0 is wrong: input should be an object."),
    (RESPONSES, {"input": "a", "previous_response_id": "x"}, "previous_response_id",
     "The field previous_response_id is not supported here."),
    (RESPONSES, {"input": "a", "include": ["reasoning.encrypted_content"]}, "include",
     "The field include is not supported here."),
    (RESPONSES, {"input": part({"type": "input_image", "image_url": "x"})}, "input.0.content.0.image_url",
     "The field input.0.content.0.image_url is not supported here."),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}}, "text.format",
     NOT_USED),
    (RESPONSES, {"input": "a", "reasoning": {"effort": "low"}}, "reasoning.effort", "The field reasoning.effort is 'low'"),
    (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": BAD}], "tool_choice": "required"},
     "tools", NOT_USED),
    (MESSAGES, {"max_tokens": 5, "stop_sequences": ["a"] * 2000}, "stop_sequences",
     "The field stop_sequences is wrong: list should have at most 1024 items"),
    (MESSAGES, {"max_tokens": 5, "stop_sequences": [""]}, "stop_sequences", "Every stop string must be a text"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be an integer"),
    (MESSAGES, {"max_tokens": 5, "messages": part({"type": "image", "source": {}})}, "messages.0.content.0.type",
     "The field messages.0.content.0.type is wrong: input should be one of 'text', 'thinking', "),
    (MESSAGES, {"max_tokens": 5, "messages": part({"text": "a"})}, "messages.0.content.0.type",
     "The field messages.0.content.0.type is missing."),
    (MESSAGES, {"max_tokens": 5, "tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}}, "tools",
     NOT_USED),
    (MESSAGES, {"max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": BAD}}},
     "output_config.format", NOT_USED),
    (MESSAGES, {"max_tokens": 5, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type",
     "The field tools.0.type is wrong: input should be 'custom'."),
    (MESSAGES, {"max_tokens": 5, "tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name",
     "The field tool_choice.name is missing."),
    (MESSAGES, {"max_tokens": 5, "tools": [CLOCK], "tool_choice": {"type": "any", "name": "clock"}}, "tool_choice.name",
     "The field tool_choice.name is not supported here."),
    (MESSAGES, {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": []}]}]},
     "messages.0.content.0.citations", "The field messages.0.content.0.citations is not supported here."),
    (MESSAGES, {"max_tokens": 5, "system": [{"type": "text", "text": "x", "cache_control": 5}]},
     "system.0.cache_control", "The field system.0.cache_control is wrong"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}, "strict": True}},
     "response_format.strict", "The field response_format.strict is not supported here."),
    (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, None,
     "The field messages.0.images is not supported here."),
    (OLLAMA, {"options": {"num_predict": 0}}, None, "options.num_predict is 0; it must be an integer"),
    (OLLAMA, {"options": {"repeat_penalty": -1}}, None, "options.repeat_penalty is -1"),
    (OLLAMA, {"options": {"temperature": -1}}, None, "options.temperature is -1"),
    (OLLAMA, {"think": "low"}, None, "The field think is 'low'"),
    (OLLAMA, {"format": {"enum": ["x" * 200_000]}}, None, "format has 2000"),
    (CHAT, {"tools": [tool({})], **schema({"enum": ["x" * 200_000]})}, None, " characters; at most "),
    ("/detokenize", {"tokens": [99999]}, "tokens", "The token id 99999 does not exist"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tooled(start, tmp_path_factory):
    """With a place for tools, and calls in tags."""
    template = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + tiny_models.TEMPLATE
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("tooled"), template))


@pytest.mark.parametrize(
    ("path", "body", "param", "sentence"), REFUSED, ids=[f"{p} {json.dumps(b)[:60]}" for p, b, *_ in REFUSED]
)
def test_a_refusal_names_the_field_as_it_was_sent(tooled, path, body, param, sentence):
    chats = {"messages": U} if path in (CHAT, MESSAGES, OLLAMA) else {}
    with tooled.http as http:
        answer = http.post(path, json={"model": "tiny"} | chats | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if path == OLLAMA else error["message"]
    assert sentence in message and re.search(r"[.!]$", message), message
    if path != OLLAMA:
        assert error["param"] == param, error


@pytest.mark.parametrize("content", ["", "null", "[1]", '"text"'])
def test_what_is_no_object_has_no_field(tooled, content):
    with tooled.http as http:
        answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    told = {"message": "The body must be a JSON object, sent as application/json.", "param": None}
    assert told.items() <= answer.json()["error"].items()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            b"[" * 60_000 + b"]" * 60_000,
            "The body is nested too deep to be read; send fewer levels of lists and objects.",
        ),
        (b"9" * 5000, "The body has a whole number of more digits than are read; send a smaller one."),
        (b'"\xff"', "The body is no JSON in UTF-8."),
    ],
)
def test_what_cannot_be_parsed_is_told_as_what_it_is(tooled, value, sentence):
    with tooled.http as http:
        headers = {"content-type": "application/json"}
        answer = http.post(PLAIN, content=b'{"prompt": "a", "seed": %s}' % value, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == sentence
