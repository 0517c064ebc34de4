"""Requests in which one value is an odd one, wherever it stands: none is a fault of the server."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest

TRIED = 1000
TEXTS = ["", "\ud800", "a\udfffb", "\x00", "\x85", "\x1b[2J", "\uffff", "\U0010ffff", "\u2028", "\ufeff", "a" * 300]
NUMBERS = [0, -1, 1.5, 1e308, 10**30, 2**63, 2**64, -(2**63) - 1, float("nan"), float("inf")]
OTHERS: list[Any] = [None, True, [], {}, [[]], [None], [""], {"": ""}, {"": {}}, [0], [1e9]]
ASKED = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "a+"}, "b": {"enum": ["x", 1]}},
    "required": ["a"],
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "u"},
    {"role": "assistant", "content": "x", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "i", "content": "r"},
]
SAMPLED = {"max_tokens": 2, "stop": ["q"], "seed": 1, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": TALK, "tools": [TOOL], "tool_choice": "auto", "logit_bias": {"5": 1}, **SAMPLED},
    ),
    (
        "/v1/chat/completions",
        {"messages": ASKED, "response_format": FORM, "logprobs": True, "top_logprobs": 2, "max_tokens": 2},
    ),
    ("/v1/chat/completions", {"messages": ASKED, "tools": [TOOL], "tool_choice": NAMED, "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "n": 2, **SAMPLED}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a+"}, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [[5, 6]], "structured_outputs": {"grammar": 'start: "a"'}, "max_tokens": 2}),
    ("/v1/embeddings", {"input": ["a"], "encoding_format": "float"}),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}], "instructions": "i", "max_output_tokens": 16}),
    ("/v1/responses", {"input": "x", "metadata": {"a": "b"}, "max_output_tokens": 16}),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 2,
            "system": "s",
            "stop_sequences": ["x"],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        },
    ),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/tokenize", {"messages": TALK, "tools": [TOOL]}),
    ("/detokenize", {"tokens": [1]}),
    ("/api/chat", {"messages": ASKED, "options": {"num_predict": 2, "stop": ["a"]}, "format": SCHEMA}),
    ("/api/generate", {"prompt": "x", "system": "s", "options": {"num_predict": 2}}),
]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def ways(body: dict[str, Any], path: tuple, odd: Any) -> Iterator[Any]:
    """``odd`` instead of what is at the path, and in objects instead of its name, and as one more field."""
    if not path:
        yield odd
        return
    name = odd if isinstance(odd, str) else str(odd)
    for way in ("value", "name", "field"):
        whole = copy.deepcopy(body)
        at = reduce(operator.getitem, path[:-1], whole)
        if way == "value":
            at[path[-1]] = odd
        elif isinstance(at, list):
            continue
        else:
            at[name] = at.pop(path[-1]) if way == "name" else odd
        yield whole


def cases(odds: list[Any]) -> list[tuple[str, Any]]:
    found = []
    for url, body in BODIES:
        whole = {"model": "tiny", "stream": False} | body
        found += [(url, asked) for path in places(whole) for odd in odds for asked in ways(whole, path, odd)]
    return found


@pytest.mark.parametrize("odds", [["\ud800"], TEXTS, NUMBERS, OTHERS], ids=["surrogate", "texts", "numbers", "others"])
def test_no_value_is_a_fault_of_the_server(start, odds):
    running = start(max_model_len=64)
    tried = cases(odds)
    rng = np.random.default_rng()
    seen = set()
    with running.http as client:
        for at in rng.permutation(len(tried))[:TRIED]:
            url, asked = tried[at]
            if isinstance(asked, dict) and asked.get("stream") is False and rng.integers(2):
                asked["stream"] = True
            response = client.post(url, content=json.dumps(asked), headers={"content-type": "application/json"})
            seen.add(response.status_code)
            faults = [b"server_error", b"has a defect"]
            assert response.status_code < 500 and not any(fault in response.content for fault in faults), (url, asked)
    assert 400 in seen and (odds == ["\ud800"] or 200 in seen)
    running.wait_until_free()
