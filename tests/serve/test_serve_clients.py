"""What programs send beside what they want: it is taken where it changes nothing, and a refusal names the field."""

from __future__ import annotations

import json
import time

import pytest
import tiny_models

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 0, "seed": 1}
TAKEN = [
    {"metadata": {"team": "a"}},
    {"store": False},
    {"service_tier": "auto"},
    {"modalities": ["text"]},
    {"tool_choice": "auto", "tools": []},
    {"top_logprobs": 0, "logprobs": False},
    {"safety_identifier": "x", "prompt_cache_key": "y", "user": "z"},
    {"chat_template_kwargs": {"self": 1, "begin": 2, "variables": 3}},
    {"messages": [{**ASK["messages"][0], "annotations": [], "refusal": None}]},
]
REFUSED = [
    ({"store": True}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities.1"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": "y"}]}]},
        "messages.0.content.0.image_url",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"stop": 5}, "stop"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
]


@pytest.mark.parametrize("fields", TAKEN, ids=lambda fields: next(iter(fields)))
def test_what_changes_nothing_is_taken(running, fields):
    with running.http as http:
        plain, answer = (http.post("/v1/chat/completions", json=ASK | more) for more in ({}, fields))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain.json()["choices"]


THINKS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
    "{% if enable_thinking is defined and not enable_thinking %} and do not think{% endif %}" + tiny_models.TEMPLATE
)


@pytest.fixture(scope="module")
def thinks(start, tmp_path_factory):
    """A server whose template has a place for how long to think, and whether."""
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("thinks"), THINKS))


def test_how_long_to_think_is_the_templates(thinks):
    """By each protocol's name for it, which the prompt's length tells."""
    chat, said, ollama = "/v1/chat/completions", {"input": "x", "max_output_tokens": 3}, {"num_predict": 3}
    turns = {"messages": ASK["messages"], "stream": False, "options": ollama}
    with thinks.http as http:

        def tokens(path, fields):
            answer = http.post(path, json={"model": "tiny"} | fields)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            usage = found.get("usage", found)
            return next(usage[n] for n in ("prompt_tokens", "input_tokens", "prompt_eval_count") if n in usage) + (
                usage.get("cache_read_input_tokens", 0)
            )

        def rendered(**variables):
            asked = {"model": "tiny", "messages": ASK["messages"], "chat_template_kwargs": variables}
            return http.post("/tokenize", json=asked).json()["count"]

        usual, low, high = rendered(), rendered(reasoning_effort="low"), rendered(reasoning_effort="high")
        quiet = rendered(enable_thinking=False)
        assert len({usual, low, high, quiet}) == 4
        assert tokens(chat, ASK) == tokens(chat, ASK | {"reasoning_effort": "medium"}) == usual
        assert tokens(chat, ASK | {"reasoning_effort": "low"}) == low
        assert tokens(chat, ASK | {"reasoning_effort": "none"}) == quiet
        assert tokens("/v1/responses", said | {"reasoning": {"effort": "high"}}) == high
        assert tokens("/v1/responses", said | {"reasoning": {"effort": None}}) == usual
        assert tokens("/api/chat", turns | {"think": "low"}) == low
        assert tokens("/api/chat", turns | {"think": False}) == quiet
        assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"][2:] == ["thinking"]
        assert tokens("/api/generate", {"prompt": "x", "think": "high", "stream": False, "options": ollama}) == high
        messages = {"messages": ASK["messages"], "max_tokens": 3}
        assert tokens("/v1/messages", messages | {"thinking": {"type": "disabled"}}) == quiet
        assert tokens("/v1/messages", messages | {"thinking": {"type": "adaptive"}}) == usual
        counted = {"messages": ASK["messages"], "thinking": {"type": "disabled"}}
        assert tokens("/v1/messages/count_tokens", counted) == quiet
        twice = ASK | {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
        refused = http.post(chat, json=twice)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("/v1/chat/completions", {"reasoning_effort": "much"}, "reasoning_effort"),
        ("/v1/responses", {"messages": None, "input": "x", "reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ],
)
def test_thoughts_that_cannot_be_asked_for(running, path, fields, param):
    asked = {"model": "tiny"} | ({} if "input" in fields else {"messages": ASK["messages"], "max_tokens": 3}) | fields
    with running.http as http:
        answer = http.post(path, json={key: value for key, value in asked.items() if value is not None})
    assert answer.status_code == 400 and param in answer.text, answer.text


NOTHING_OF_RESPONSES = {
    "include": [], "previous_response_id": None, "background": False, "prompt_cache_key": "x", "safety_identifier": "y",
    "service_tier": "auto", "store": False, "truncation": "disabled", "conversation": None, "max_tool_calls": None,
    "reasoning": None, "top_logprobs": 0, "user": "z", "metadata": {"a": "b"},
}  # fmt: skip


def test_what_changes_nothing_of_the_other_protocols_is_taken(running):
    asked = {"model": "tiny", "input": "x", "max_output_tokens": 3, "temperature": 0}
    generate = {"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 3, "temperature": 0}}
    nothing = {"suffix": "", "template": "", "system": "", "raw": False, "context": [], "images": [], "format": ""}
    messages = {"model": "tiny", "messages": ASK["messages"], "max_tokens": 3, "temperature": 0}
    with running.http as http:
        for path, plain, more, key in (
            ("/v1/responses", asked, NOTHING_OF_RESPONSES, "status"),
            ("/v1/responses", asked, {"stream_options": {"include_obfuscation": False}}, "status"),
            ("/v1/responses", asked, {"tools": [], "tool_choice": "auto"}, "status"),  # as in each answer
            ("/v1/messages", messages, {"tools": [], "tool_choice": {"type": "auto"}}, "content"),
            ("/api/generate", generate, nothing, "response"),
            ("/api/generate", generate, {"options": generate["options"] | {"num_ctx": 16}}, "response"),
            ("/v1/messages", messages, {"service_tier": "auto", "thinking": {"type": "disabled"}}, "content"),
        ):
            one, two = (http.post(path, json=body) for body in (plain, plain | more))
            assert one.status_code == two.status_code == 200, two.text
            assert one.json()[key] == two.json()[key]
        longer = http.post("/api/generate", json=generate | {"options": {"num_ctx": 1 << 20}})
    assert (
        longer.status_code == 400 and "num_ctx" in longer.json()["error"] and "--max-context" in longer.json()["error"]
    )


def test_streams_without_obfuscation(running):
    options = {"include_usage": True, "include_obfuscation": False}
    with running.http as http:
        answer = http.post("/v1/chat/completions", json=ASK | {"stream": True, "stream_options": options})
    assert answer.status_code == 200 and '"completion_tokens":3' in answer.text


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_refusal_names_the_field(running, fields, param):
    with running.http as http:
        answer = http.post("/v1/chat/completions", json=ASK | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and f"The field {param} is " in error["message"]


def test_an_event_is_one_line_of_text(running):
    """To Ollama's client, too, and to all who read by httpx: a line ends at more than line feeds there."""
    text = "a\u2028b\u0085\u2029c"
    schema = {"type": "json_schema", "name": "x", "schema": {"const": text}}
    with running.http as http:
        for path, body in (
            ("/v1/chat/completions", ASK | {"max_tokens": 40, "structured_outputs": {"json": {"const": text}}}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 40, "text": {"format": schema}}),
            ("/api/chat", {"messages": ASK["messages"], "format": {"const": text}}),
        ):
            with http.stream("POST", path, json={"model": "tiny", "stream": True} | body) as answer:
                events = [line.removeprefix("data: ") for line in answer.iter_lines() if '"' in line]
            found = [json.loads(event) for event in events]
            pieces = [e["choices"][0]["delta"] if "choices" in e else e.get("message", e) for e in found]
            said = "".join(piece.get("content") or piece.get("delta", "") for piece in pieces)
            assert json.loads(said) == text, path


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/api/version", "/metrics"])
def test_head_is_get_without_a_body(running, path):
    """Load balancers ask so, and Ollama's client whether anybody is there."""
    with running.http as http:
        asked, got = http.head(path), http.get(path)
        assert (asked.status_code, asked.content) == (200, b"") and got.content
        assert asked.headers["content-type"] == got.headers["content-type"]
        assert http.head("/v1/chat/completions").status_code == 405
        assert http.head("/nothing").status_code == 404


def test_what_is_in_memory_by_ollamas_protocol(running):
    with running.http as http:
        [model] = http.get("/api/ps").json()["models"]
    assert model["name"] == "tiny" and model["size"] > 0 and model["size_vram"] == 0, "the CPU has no memory of its own"


def test_an_answer_on_an_open_connection_waits_for_no_receipt(running):
    """Head and body of an answer are two writes: Nagle's algorithm holds the second until the first's receipt, 40 ms."""
    took = []
    with running.http as client:
        for _ in range(20):
            begun = time.perf_counter()
            client.post("/tokenize", json={"prompt": "x"}).raise_for_status()
            took.append(time.perf_counter() - begun)
    assert min(took[5:]) < 0.03, took


def test_ollamas_programs_need_not_name_the_kind_of_their_bodies(running):
    """Nor does curl; but a page of somebody else's must, which then has to ask first."""
    body = b'{"model": "tiny", "prompt": "x", "stream": false, "options": {"num_predict": 2}}'
    with running.http as http:
        for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
            headers = {} if kind is None else {"content-type": kind}
            assert http.post("/api/generate", content=body, headers=headers).status_code == 200
            from_page = headers | {"origin": "http://example.com"}
            assert http.post("/api/generate", content=body, headers=from_page).status_code == 400
            assert http.post("/v1/completions", content=body, headers=headers).status_code == 400


def test_what_ollamas_programs_send_unasked(running):
    options = {"num_predict": -2, "seed": -1, "mirostat": None, "stop": ["a", "e", "i", " "]}
    with running.http as http:
        asked = {"model": "tiny", "messages": ASK["messages"], "stream": False, "options": options}
        assert http.post("/api/chat", json=asked).status_code == 200
        for path, said in (("/api/generate", {}), ("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})):
            loaded = http.post(path, json={"model": "tiny", "keep_alive": -1} | said).json()
            assert loaded["done"] and loaded["done_reason"] == "load"
        assert http.post("/api/show", json={"name": "tiny"}).json()["capabilities"]
        embedded = http.post("/api/embed", json={"model": "tiny", "input": "x", "options": {"mirostat": None}})
        assert embedded.status_code == 200, embedded.text


@pytest.mark.parametrize("seed", [-1, -(2**63)])
def test_seeds_may_be_negative(running, seed):
    with running.http as http:
        first, again = (
            http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 8, "seed": seed}).json()
            for _ in range(2)
        )
        assert first["choices"] == again["choices"]
        wrong = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "seed": -(2**63) - 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "seed"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"x": [1e999]}}]}),
        ("/v1/chat/completions", ASK | {"chat_template_kwargs": {"x": {"y": -1e999}}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"minimum": float("nan")}}}),
    ],
)
def test_numbers_within_objects_are_finite(running, path, fields):
    body = json.dumps({"model": "tiny"} | fields).replace("Infinity", "1e999")
    with running.http as http:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "not finite" in answer.json()["error"]["message"], answer.text


def nested(depth):
    found = {}
    for _ in range(depth):
        found = {"properties": found}
    return found


def function(**parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("depth", [130, 300, 600])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", lambda deep: {"tools": [function(**deep)], "tool_choice": "required"}),
        ("/v1/chat/completions", lambda deep: {"tools": [function(**deep)]}),
        ("/v1/chat/completions", lambda deep: {"chat_template_kwargs": deep}),
        ("/tokenize", lambda deep: {"chat_template_kwargs": deep}),
        ("/api/chat", lambda deep: {"format": deep}),
        ("/api/generate", lambda deep: {"prompt": "x", "messages": None, "format": deep}),
        (
            "/api/chat",
            lambda deep: {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]},
                ]
            },
        ),
    ],
)
def test_objects_are_not_too_deep(running, path, field, depth):
    with running.http as http:
        answer = http.post(path, json={"model": "tiny", "messages": ASK["messages"]} | field(nested(depth)))
    assert answer.status_code == 400 and "nested deeper than 128 levels" in answer.text, answer.text


def test_options_of_streams_are_for_streams(running):
    with running.http as http:
        for path, said in (("/v1/chat/completions", ASK), ("/v1/completions", {"model": "tiny", "prompt": "x"})):
            answer = http.post(path, json=said | {"stream_options": {"include_usage": True}})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_chunks_have_no_usage_but_the_last(running, options):
    """As OpenAI says: where usage is asked for all others have the field, too, and it is null."""
    asked = {"model": "tiny", "max_tokens": 5, "stream": True, **options}
    for stream in (
        running.openai.chat.completions.create(messages=ASK["messages"], **asked),
        running.openai.completions.create(prompt="x", **asked),
    ):
        *others, last = stream
        assert all(chunk.usage is None for chunk in others)  # none where one chunk has all
        assert {"usage" in chunk.model_fields_set for chunk in (*others, last)} == {bool(options)}
        assert not options or (last.choices == [] and last.usage.completion_tokens == 5)


@pytest.mark.parametrize(
    ("path", "module", "fields", "form"),
    [
        ("/v1/chat/completions", "chat_completions", {}, {"error"}),
        ("/v1/responses", "responses", {"input": "x"}, {"error"}),
        ("/v1/messages", "messages", {"max_tokens": 1}, {"type", "error"}),
        ("/api/chat", "ollama", {}, {"error"}),
    ],
)
def test_a_fault_that_nobody_foresaw_has_the_protocols_form(running, monkeypatch, capsys, path, module, fields, form):
    async def fails(*_):
        raise ValueError("what a prompt said")

    monkeypatch.setattr(f"engine.serve.{module}.prepare", fails)
    given = fields if "input" in fields else {"messages": ASK["messages"], **fields}
    with running.http as http:
        answer = http.post(path, json={"model": "tiny", **given})
    assert answer.status_code == 500 and answer.headers["x-request-id"]
    found = answer.json()
    assert set(found) == form
    error = found["error"]
    sentence = error if path.startswith("/api/") else error["message"]
    assert sentence == "The server has a defect; its log tells more under this request's id."
    kind = "api_error" if path == "/v1/messages" else "server_error"
    assert path.startswith("/api/") or error["type"] == kind
    running.wait_until_logged(path=path, status=500)
    told = capsys.readouterr().err
    assert '"defect"' in told and "ValueError" in told and answer.headers["x-request-id"] in told
    assert "what a prompt said" not in told
