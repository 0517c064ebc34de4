"""Chat templates: what they give, letter by letter; as transformers renders them; and what a bad one may not do."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from handmade import gguf_bytes, safetensors_bytes

from engine.errors import FormatError, TemplateError
from engine.formats import open_checkpoint
from engine.formats.chat_template import ChatTemplate

NAMES = (
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
)
USER = {"role": "user", "content": " Hi & <b>\u00e9</b> "}
ASSISTANT = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather's <state> \u2014 now",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"place": "\u0160umava"}}}
    ],
}
RESULT = {"role": "tool", "name": "weather", "content": "snow", "tool_call_id": "abcdefghi"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([USER, ASSISTANT, USER], None),
    "ends with the assistant": ([USER, ASSISTANT], None),
    "thought": ([USER, ASSISTANT | {"content": "<think>\nhm\n</think>\n\nHello."}, USER], None),
    "tools": ([SYSTEM, USER], [WEATHER]),
    "call and result": ([USER, CALL, RESULT], [WEATHER]),
    "no message of the user": ([ASSISTANT], None),
}


def test_which_variables_a_template_looks_at():
    optional = "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ effort }}"
    template = ChatTemplate(
        optional + "{% macro say(x) %}{{ x }}{% endmacro %}{{ say(messages) }}", tool_source="{{ tools }}"
    )
    found = {name for name in ("effort", "x", "say", "messages", "tools", "other") if template.reads(name)}
    assert found == {"effort", "messages", "tools"}
    with pytest.raises(TemplateError):
        ChatTemplate("{% if %}").reads("x")


def test_qwen3_can_be_told_not_to_think(shared):
    template = _template(shared, "Qwen-Qwen3-0.6B")
    assert template.reads("enable_thinking") and not template.reads("reasoning_effort")


def _template(shared: Path, name: str) -> ChatTemplate:
    return ChatTemplate((shared / "templates" / f"{name}.jinja").read_text(), {"bos_token": "<s>", "eos_token": "</s>"})


def test_qwen3(shared: Path) -> None:
    template = _template(shared, "Qwen-Qwen3-0.6B")
    assert template.render([SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Why?"}]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n Hi & <b>\u00e9</b> <|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render([USER], enable_thinking=False) == (
        "<|im_start|>user\n Hi & <b>\u00e9</b> <|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert template.render([USER], add_generation_prompt=False).endswith("<|im_end|>\n")


def test_qwen3_tools(shared: Path) -> None:
    text = _template(shared, "Qwen-Qwen3-0.6B").render([USER, CALL, RESULT], tools=[WEATHER])
    assert text == (
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "weather", "description": "The weather\'s <state> \u2014 now", '
        '"parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}\n'
        "</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n Hi & <b>\u00e9</b> <|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"place": "\u0160umava"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsnow\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_llama3(shared: Path) -> None:
    assert _template(shared, "meta-llama-Llama-3.1-8B-Instruct").render([SYSTEM, USER]) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi & <b>\u00e9</b><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_mistral(shared: Path) -> None:
    template = _template(shared, "mistralai-Mistral-Nemo-Instruct-2407")
    assert template.render([SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Why?"}]) == (
        "<s>[INST] Hi & <b>\u00e9</b> [/INST]Hello.</s>[INST]Be brief.\n\nWhy?[/INST]"
    )
    assert template.render([USER, CALL, RESULT]) == (
        "<s>[INST] Hi & <b>\u00e9</b> [/INST]"
        '[TOOL_CALLS][{"name": "weather", "arguments": {"place": "\u0160umava"}, "id": "abcdefghi"}]</s>'
        '[TOOL_RESULTS]{"content": snow, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    )


def test_gemma_and_phi(shared: Path) -> None:
    gemma = _template(shared, "google-gemma-2-2b-it")
    assert gemma.render([USER]) == "<s><start_of_turn>user\nHi & <b>\u00e9</b><end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(TemplateError, match=r"refuses these messages: System role not supported\.$"):
        gemma.render([SYSTEM, USER])
    phi = _template(shared, "microsoft-Phi-3.5-mini-instruct")
    assert phi.render([USER, ASSISTANT], add_generation_prompt=False) == (
        "<|user|>\n Hi & <b>\u00e9</b> <|end|>\n<|assistant|>\nHello.<|end|>\n</s>"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_as_transformers_renders(name: str, conversation: str, prompt: bool, shared: Path) -> None:
    module = pytest.importorskip(
        "transformers.utils.chat_template_utils", reason="transformers, the peer of this test, is not installed"
    )
    template = _template(shared, name)
    messages, tools = CONVERSATIONS[conversation]
    options: dict[str, Any] = {"add_generation_prompt": prompt, "tools": tools}
    try:
        [expected], _ = module.render_jinja_template(
            [messages], chat_template=template.source, bos_token="<s>", eos_token="</s>", **options
        )
    except Exception as error:
        with pytest.raises(TemplateError) as caught:
            template.render(messages, **options)
        assert str(error).rstrip(".") in str(caught.value)
    else:
        assert template.render(messages, **options) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"tool_calls": None, "function_call": None},
        CALL | {"content": None},
        {"reasoning": "hm", "refusal": None},
        {"thinking": "hm", "reasoning_content": None},
        {"thinking": "a", "reasoning_content": "b"},
    ],
)
def test_messages_are_given_as_transformers_gives_them(more: dict[str, Any]) -> None:
    """As openai's model_dump and programs of other ages write them."""
    transformers = pytest.importorskip("transformers", reason="transformers, the peer of this test, is not installed")
    source = """{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}
        {{- m.thinking }}{{ m.reasoning_content }}{{ m | length }}{% endfor %}"""
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    messages = [USER, ASSISTANT | more]
    want = fast.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert ChatTemplate(source).render(messages) == want


def test_the_environment_of_templates() -> None:
    def render(source: str, **variables: Any) -> str:
        return ChatTemplate(source, {"bos_token": "B"}).render([USER], **variables)

    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"  # trim_blocks and lstrip_blocks
    assert render("{{ x | tojson }}", x={"b": "<\u00e9>'", "a": 1}) == '{"b": "<\u00e9>\'", "a": 1}'
    assert render("{{ x | tojson(indent=2, sort_keys=true) }}", x={"b": 1, "a": 2}) == '{\n  "a": 2,\n  "b": 1\n}'
    assert render("{{ x | tojson(indent='\t') }}", x=[1]) == "[\n\t1\n]"
    assert render("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b") == "a2b"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert (
        render("{{ bos_token }}{{ eos_token is defined }}{{ tools is none }}{{ documents is none }}")
        == "BFalseTrueTrue"
    )
    assert render("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 3 * 4 }}") == "ababab102412"


BAD = {
    "syntax": ("{% if %}", "not valid"),
    "unclosed": ("{{ messages", "not valid"),
    "unknown filter": ("{{ messages | nothing }}", "not valid"),
    "unknown tag": ("{% nothing %}", "not valid"),
    "deep": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "not valid"),
    "too long": ("x" * ((1 << 20) + 1), "has 1048577 characters"),
    "undefined": ("{{ absent.name }}", "'absent' is undefined"),
    "include": ("{% include 'file' %}", "refuses"),
    "escape by class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "escape by globals": ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
    "escape by format": ("{{ '{0.__class__.__name__}'.format(1) }}", "unsafe"),
    "escape by path": ("{{ [1] | join(attribute='real.__class__.__name__') }}", "unsafe"),
    "changes the messages": ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "long output": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "makes more than 4200"),
    "long string": ("{{ 'x' * 99999999999 }}", "makes more than 4200"),
    "long list": ("{{ (99999999999 * [1]) | length }}", "makes more than 4200"),
    "long sum": ("{{ ([[1] * 9999] * 9999) | sum(start=[]) | length }}", "makes more than 4200"),
    "large power": ("{{ 9 ** 99999999 }}", "number is too large"),
    "large range": ("{{ range(99999999) | list }}", "Range too big"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "raises": ("{{ raise_exception('Say\nno') }}", "refuses these messages: Say no"),
    "no JSON": ("{{ raise_exception | tojson }}", "not JSON serializable"),
    "slow": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "takes longer than 0.5 s",
    ),
    "slow sums": ("{{ ([range(99999)] * 999) | map('sum') | max }}", "takes longer than 0.5 s"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_templates_get_a_sentence(name: str) -> None:
    source, reason = BAD[name]
    messages = [dict(USER)]
    with pytest.raises(TemplateError, match=reason) as caught:
        ChatTemplate(source).render(messages)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert messages == [USER]


def test_template_of_a_gguf(write_gguf: Callable[..., Path]) -> None:
    keys: list[tuple[str, str, Any]] = [
        ("general.architecture", "str", "llama"),
        ("tokenizer.ggml.tokens", "[str]", ["a", "<bos>", "<eos>"]),
        ("tokenizer.ggml.bos_token_id", "u32", 1),
        ("tokenizer.ggml.eos_token_id", "u32", 2),
        ("tokenizer.ggml.padding_token_id", "u32", 0),
        ("tokenizer.ggml.unknown_token_id", "u32", 3),
    ]
    assert open_checkpoint(write_gguf(data=gguf_bytes(keys))).chat_template() is None
    keys.append(
        (
            "tokenizer.chat_template",
            "str",
            "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}{{ unk_token }}",
        )
    )
    template = open_checkpoint(write_gguf(data=gguf_bytes(keys))).chat_template()
    assert template is not None
    assert template.render([ASSISTANT]) == "<bos>Hello.<eos>a"
    keys.append(("tokenizer.chat_template.tool_use", "str", "tools"))
    template = open_checkpoint(write_gguf(data=gguf_bytes(keys))).chat_template()
    assert template is not None
    assert template.render([ASSISTANT], tools=[WEATHER]) == "tools"
    keys[-2] = ("tokenizer.chat_template", "u32", 1)
    with pytest.raises(FormatError, match="must be a string"):
        open_checkpoint(write_gguf(data=gguf_bytes(keys))).chat_template()


def test_template_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({}))

    def rendered(tools: list[dict[str, Any]] | None = None) -> str:
        template = open_checkpoint(tmp_path).chat_template()
        assert template is not None
        return template.render([ASSISTANT], tools=tools)

    assert open_checkpoint(tmp_path).chat_template() is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "0"}))
    assert rendered() == "0"
    settings = {
        "bos_token": {"content": "<bos>"},
        "eos_token": "<eos>",
        "sep_token": "<sep>",
        "unk_token": None,
        "chat_template": "{{ bos_token }}1{{ eos_token }}{{ sep_token }}{{ unk_token }}{{ pad_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert rendered() == "<bos>1<eos><sep>"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>", "sep_token": "<other>"}))
    assert rendered() == "<bos>1<eos><other><pad>"
    named = [{"name": "default", "template": "2"}, {"name": "tool_use", "template": "3"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert (rendered(), rendered([WEATHER])) == ("2", "3")
    (tmp_path / "chat_template.jinja").write_text("4")
    assert (rendered(), rendered([WEATHER])) == ("4", "4")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("5")
    assert (rendered(), rendered([WEATHER])) == ("4", "5")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match="not valid UTF-8"):
        rendered()


def test_templates_as_transformers_saves_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers, the peer of this test, is not installed")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({}))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    fast.chat_template = {"default": "plain\n", "tool_use": "with {{ tools | length }} tool"}
    fast.save_pretrained(tmp_path)
    template = open_checkpoint(tmp_path).chat_template()
    assert template is not None
    for tools in (None, [WEATHER]):
        want = fast.apply_chat_template([ASSISTANT], tools=tools, tokenize=False)
        assert template.render([ASSISTANT], tools=tools) == want


def test_arguments_that_a_template_wants_as_text() -> None:
    """DeepSeek's add them to texts; most others write them with tojson."""
    call = "{{ m.name + '<' + m.arguments + '>' }}{{ m.arguments + '!' }}{{ m.arguments | tojson }}"
    message = {"name": "weather", "arguments": {"place": "Šumava", "days": [1]}}
    said = '{"place": "Šumava", "days": [1]}'
    source = f"{{% for m in messages %}}{call}{{% endfor %}}"
    assert ChatTemplate(source).render([message]) == f"weather<{said}>{said}!{said}"


def test_thoughts_and_a_text_beside_calls_in_channels() -> None:
    """gpt-oss's template refuses both, though the model may write both."""
    source = """{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
        {{- '<|channel|>' + (m.thinking or m.content) }}{% endfor %}"""
    thoughtful = ASSISTANT | CALL | {"content": "I look.", "reasoning_content": "Hm."}
    assert ChatTemplate(source).render([thoughtful]) == "<|channel|>Hm.\n\nI look."
    assert ChatTemplate(source).render([thoughtful | {"reasoning_content": None}]) == "<|channel|>I look."
    assert ChatTemplate(source).render([thoughtful | {"content": ""}]) == "<|channel|>Hm."
