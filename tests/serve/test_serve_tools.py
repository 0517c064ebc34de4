"""Tools that a served model may call, must call, or may call beside a form."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import openai
import pytest
import tiny_models

from engine.answers import PartialCall, Parts, Reading
from engine.sampling.grammar import GrammarCompiler
from engine.serve.calling import wanted
from engine.serve.fields import ChatBody, Function
from engine.serve.messages import MessagesBody

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def tooled(start, tmp_path_factory):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tiny_models.TEMPLATE
    template = template.replace(
        "{% endfor %}", "{% for c in m.tool_calls or () %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("tooled"), template))


def ask(running, **fields):
    given = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hm?"}],
        "max_tokens": 600,
        "tools": [WEATHER, CLOCK],
    }
    return running.openai.chat.completions.create(**(given | fields))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_are_valid_and_stream(tooled, choice):
    seeds = [int(seed) for seed in np.random.default_rng().integers(0, 2**32, 2)]
    for seed in seeds:
        answer = ask(tooled, tool_choice=choice, seed=seed).choices[0]
        assert answer.finish_reason == "tool_calls"
        [call] = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2, 3)
        assert choice == "required" or call.function.name == "weather"
        pieces = [
            piece
            for chunk in ask(tooled, tool_choice=choice, seed=seed, stream=True)
            for each in chunk.choices
            for piece in each.delta.tool_calls or ()
        ]
        assert pieces[0].function.name == call.function.name
        assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
        assert call.function.name == "clock" or len(pieces) > 2


def test_results_of_calls_go_back(tooled):
    """The history of OpenAI's client is taken as it is, its own answer included."""
    called = ask(tooled, tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sun."}
    messages = [{"role": "user", "content": "Hm?"}, called, result]
    assert ask(tooled, messages=messages, max_tokens=3).choices[0].finish_reason == "length"
    with tooled.http as http:
        wire = [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in messages]
        ids = http.post("/tokenize", json={"messages": wire}).json()["tokens"]
    city = json.loads(called.tool_calls[0].function.arguments)["city"]
    assert tooled.engine.tokenizer.decode(ids) == f"<user>Hm?<assistant>{city}<tool>Sun.<assistant>"


CUT = [
    '{"city": "ab',
    '{"city": "\\ud800"}',
    '{"city": 1e999}',
    "",
    "no JSON",
    "[1, 2]",
    '{"city": NaN}',
    '"text"',
    "null",
    "[" * 5000,
]


@pytest.mark.parametrize("arguments", CUT)
def test_an_answer_whose_call_was_cut_goes_back(told, arguments):
    """As it came: a text where it is no JSON."""
    call = {"id": "i", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with told.http as http:
        ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    shown = told.engine.tokenizer.decode(ids).removeprefix("<user>Hm?<assistant>").removesuffix("<assistant>")
    assert shown == {"": "{}", '"text"': "text"}.get(arguments, arguments)


WRITTEN = {
    '{"a": [1e999, -1e999, NaN, -Infinity, 1.5, -0.0], "b": 1}': {"a": [None, None, None, None, 1.5, -0.0], "b": 1},
    '{"a": "\\ud800 \\ud83d\\ude00"}': {"a": "? \U0001f600"},
    "[1, 2]": {},
    "null": {},
    '{"a": ' + "[" * 50_000: {},
}


@pytest.mark.parametrize("written", WRITTEN)
def test_arguments_are_an_object_of_json_where_a_protocol_has_one(tooled, monkeypatch, written):
    """Whatever the model has written: neither a fault of the server nor what is no JSON."""
    monkeypatch.setattr(Reading, "read", lambda *_: Parts(calls=(PartialCall("weather", written),)))
    asked = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hm?"}]}
    del (ollama := asked | {"stream": False})["max_tokens"]
    with tooled.http as http:
        [block] = strictly(http.post("/v1/messages", json=asked))["content"]
        whole = strictly(http.post("/api/chat", json=ollama | {"options": {"num_predict": 2}}))["message"]
        streamed = http.post("/api/chat", json=ollama | {"stream": True, "options": {"num_predict": 2}})
    *_, last = map(json.loads, streamed.text.splitlines())
    for arguments in (block["input"], *(m["tool_calls"][0]["function"]["arguments"] for m in (whole, last["message"]))):
        assert arguments == WRITTEN[written]


def strictly(response):
    assert response.status_code == 200
    return json.loads(response.text, parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def told(start, tmp_path_factory):
    """Its template shows calls as Qwen's does."""
    written = "{% for c in m.tool_calls or () %}{% set a = c.function.arguments %}"
    written += "{{ a if a is string else a | tojson }}{% endfor %}{% endfor %}"
    template = tiny_models.TEMPLATE.replace("{% endfor %}", written)
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("told"), template), max_model_len=8192)


def test_tools_may_be_told_and_not_called(tooled):
    answer = ask(tooled, tool_choice="none", max_tokens=4)
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens < ask(tooled, tool_choice="auto", max_tokens=4).usage.prompt_tokens


@pytest.mark.parametrize("wanted", ["required", {"type": "function", "function": {"name": "visit"}}])
def test_references_within_a_tools_schema(tooled, wanted):
    """As pydantic writes models within models: they are the tool's, wherever its schema comes to stand."""
    place = {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}, "next": {"$ref": "#/$defs/Place"}},
             "required": ["days"], "additionalProperties": False}  # fmt: skip
    whole = {"type": "object", "properties": {"to": {"$ref": "#/$defs/Place"}, "self": {"$ref": "#"}}, "required": ["to"],
             "additionalProperties": False, "$defs": {"Place": place}}  # fmt: skip
    visit = {"type": "function", "function": {"name": "visit", "parameters": whole}}
    for seed in range(5):
        message = ask(tooled, tools=[CLOCK, visit], tool_choice=wanted, seed=seed, max_tokens=400).choices[0].message
        [call] = message.tool_calls
        if call.function.name == "visit" and call.function.arguments.endswith("}}"):
            jsonschema.validate(json.loads(call.function.arguments), whole)


@pytest.mark.parametrize(
    ("named", "reference"),
    [
        ({"$id": "http://x/y"}, "#/$defs/z"),
        ({"$id": "http://x/y"}, "#z"),
        ({}, "#z"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://x/y"}, "#/$defs/z"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://x/y"}, "#/$defs/z"),
    ],
)
def test_references_of_schemas_that_have_ids(tooled, tagged, named, reference):
    """Forced, beside a form, and strict; two tools of one id have each its own."""
    tools = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": {
            "type": "object", "properties": {"a": {"$ref": reference}}, "required": ["a"], "additionalProperties": False,
            "$defs": {"z": {"$anchor": "z", "const": name}}, **named}}}
        for name in ("one", "two")
    ]  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": tools[0]["function"]["parameters"]}}
    ask(tagged, tools=tools, max_tokens=1)
    for running in (tooled, tagged):
        ask(running, tools=tools, max_tokens=1, response_format=form)
    choice = {"type": "function", "function": {"name": "two"}}
    for forced in ("required", choice):
        [call] = ask(tooled, tools=tools, tool_choice=forced, max_tokens=200).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": call.function.name}


def test_an_answer_in_a_form_is_no_call(tooled, tagged):
    """Though it may look like one: where nothing can be called, or calls have tags."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"const": {"name": "clock", "arguments": {}}}},
    }
    for running, choice in ((tooled, "none"), (tagged, "none"), (tagged, "auto")):
        bias = biased(running, "{")
        message = ask(running, response_format=form, tool_choice=choice, logit_bias=bias).choices[0].message
        assert not message.tool_calls and json.loads(message.content) == {"name": "clock", "arguments": {}}


@pytest.fixture(scope="module")
def tagged(start, tmp_path_factory):
    """Its template shows calls in tags."""
    template = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + tiny_models.TEMPLATE
    return start(model=tiny_models.write_talker(tmp_path_factory.mktemp("tagged"), template))


def biased(running, letter):
    """The model says it wherever it may."""
    return {str(running.engine.tokenizer.encode(letter)[-1]): 100}


WORD = {
    "type": "object",
    "properties": {"answer": {"$ref": "#/$defs/word"}},
    "required": ["answer"],
    "additionalProperties": False,
    "$defs": {"word": {"enum": ["yes", "no"]}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "call", "text"), [("tooled", "n", "a"), ("tagged", "<", "{")])
def test_a_form_leaves_room_for_calls(request, kind, call, text, stream):
    running = request.getfixturevalue(kind)
    form = {"type": "json_schema", "json_schema": {"name": "word", "schema": WORD, "strict": True}}
    fields = {"response_format": form, "stream": stream, "parallel_tool_calls": False}
    content, calls, finish = said(ask(running, logit_bias=biased(running, call), **fields), stream)
    [(name, arguments)] = calls
    schema = next(tool for tool in (WEATHER, CLOCK) if tool["function"]["name"] == name)["function"]["parameters"]
    jsonschema.validate(json.loads(arguments), schema)
    assert finish == "tool_calls" and not content
    content, calls, finish = said(ask(running, logit_bias=biased(running, text), **fields), stream)
    jsonschema.validate(json.loads(content), WORD)
    assert finish == "stop" and not calls


def said(answer, stream):
    """Content, calls and the reason of the end."""
    if not stream:
        [choice] = answer.choices
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        return choice.message.content or "", calls, choice.finish_reason
    content, calls = "", []
    for chunk in answer:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                calls.append((call.function.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.function.arguments)
    return content, calls, choice.finish_reason


def test_several_calls_in_place_of_a_form(tagged):
    """Where a call ends the line may, and another follow."""
    bias = biased(tagged, "<") | biased(tagged, "\n")
    _, calls, _ = said(ask(tagged, response_format={"type": "json_object"}, logit_bias=bias), False)
    assert len(calls) > 1 and {name for name, _ in calls} <= {"weather", "clock"}


@pytest.fixture(scope="module")
def marking(start, tmp_path_factory):
    return start(model=tiny_models.write_marking(tmp_path_factory.mktemp("marking")))


@pytest.mark.parametrize("stream", [False, True])
def test_a_mark_that_is_a_special_token(marking, stream):
    tokens = [marking.engine.tokenizer.token_id(text) for text in tiny_models.MARKED]
    bias = {str(token): 100 - place for place, token in enumerate(tokens)}
    fields = {"logit_bias": bias, "temperature": 0, "max_tokens": 3, "stream": stream}
    once = {"no_repeat_ngram_size": 1}
    content, calls, _ = said(ask(marking, extra_body=once, **fields), stream)
    assert (content, calls) == ("I look.", [("weather", '{"city": "a"}')])
    without = {"tools": openai.omit, "extra_body": once}
    assert said(ask(marking, **fields, **without), stream)[0] == "".join(
        text for text, special in tiny_models.MARKED.items() if not special
    )


@pytest.mark.parametrize("stream", [False, True])
def test_marks_of_reasoning_that_are_special_tokens(start, tmp_path, stream):
    """As Mistral's: they are read without tools, too, and not shown."""
    pieces = {"[THINK]": True, "Maybe. ": False, "[/THINK]": True, "It is.": False}
    running = start(model=tiny_models.write_marking(tmp_path, pieces))
    tokens = [running.engine.tokenizer.token_id(text) for text in pieces]
    bias = {str(token): 100 - place for place, token in enumerate(tokens)}
    fields = {"logit_bias": bias, "temperature": 0, "max_tokens": 4, "stream": stream, "tools": openai.omit}
    answer = ask(running, extra_body={"no_repeat_ngram_size": 1}, **fields)
    found = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in found) == "Maybe."
    assert "".join(one.content or "" for one in found) == "It is."


@pytest.mark.parametrize("kind", ["tooled", "tagged"])
def test_a_form_without_room_for_calls(request, kind):
    running = request.getfixturevalue(kind)
    form = {"structured_outputs": {"regex": "[a-z]{3}"}}
    with pytest.raises(openai.BadRequestError, match="set tool_choice to none") as refused:
        ask(running, extra_body=form)
    assert refused.value.body["param"] == "structured_outputs"
    assert len(ask(running, extra_body=form, tool_choice="none").choices[0].message.content) == 3


def fits(running, form, text):
    """Whether the form allows the text, and its end there."""
    tokenizer = running.engine.tokenizer
    [matcher] = GrammarCompiler(tokenizer, tiny_models.VOCAB, tokenizer.eos_ids).matchers(form, 1, ignore_eos=False)
    mask = np.zeros((tiny_models.VOCAB + 31) // 32, np.uint32)
    for token in [*tokenizer.encode(text), min(tokenizer.eos_ids)]:
        matcher.fill(mask)
        if not mask[token // 32] >> token % 32 & 1:
            return False
        matcher.advance(token)
    return True


def test_calls_of_strict_tools_are_valid(tagged):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    fields = {"messages": [{"role": "user", "content": "Hm?"}], "tools": [strict, CLOCK]}
    model = next(iter(tagged.models.by_name.values()))
    form = wanted(ChatBody(**fields), model).form
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "ab", "days": 2}}\n</tool_call>'
    other = '<tool_call>{"name": "clock", "arguments": {"any": [1]}}</tool_call>'
    for text in (
        "",
        "Text, <tool_ and {}.\n",
        call,
        f"<think>So</think>\nI look.\n{call}",
        f"{call}\n{other}{call} So.",
    ):
        assert fits(tagged, form, text), text
    for text in ("<tool_call>", call.replace("2", "4"), f"So {call.replace('weather', 'x')}", f"{other} {call[:-14]}"):
        assert not fits(tagged, form, text), text
    assert wanted(ChatBody(**fields | {"tools": [WEATHER, CLOCK]}), model).form is None
    answer = ask(tagged, temperature=0, max_tokens=20, tools=[strict]).choices[0]
    assert answer.finish_reason == "length" and len(answer.message.content) == 20
    function = strict["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"], "strict": True}
    over_anthropic = MessagesBody(model="tiny", max_tokens=20, messages=fields["messages"], tools=[tool]).chat(model)
    assert over_anthropic.tools[0].function == Function(**function | {"description": None})
