"""Forms of answers whose calls are in tags, as the model's chat template shows them: an object in JSON, or values in tags of
their own, of which texts are plain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.answers import MINIMAX, SEED, TAG, typed, types_of
from engine.formats.chat_template import ChatTemplate
from engine.formats.tokenizer import Tokenizer
from engine.sampling import StructuredOutputs
from engine.sampling.grammar import json_in_lark

from .call_forms import CallForms, quoted
from .fields import Tool
from .object_forms import call_object


@dataclass(frozen=True)
class Tags:
    """``mark`` comes before a call and ``end`` after it. In between is an object in JSON, or ``head`` with the tool's name, for
    each value ``key``, the value, ``close`` and the line's end, and ``tail``."""

    mark: str
    end: str
    head: str = ""
    key: str = ""
    close: str = ""
    tail: str = ""


_FUNCTION = "\n<function={}>\n"
_TAGS = {
    SEED: Tags(SEED, "</seed:tool_call>", _FUNCTION, "<parameter={}>", "</parameter>", "</function>\n"),
    MINIMAX: Tags(
        MINIMAX,
        "</minimax:tool_call>",
        '\n<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>",
        "</invoke>\n",
    ),
    "<parameter=": Tags(TAG, "</tool_call>", _FUNCTION, "<parameter={}>\n", "\n</parameter>", "</function>\n"),
    "<arg_key>": Tags(TAG, "</tool_call>", "{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
    TAG: Tags(TAG, "</tool_call>"),
}
"""By what of them a template shows; Seed-OSS's, MiniMax M2's, Qwen3-Coder's, GLM 4.5's, and Hermes' and Qwen's."""
_NAME = re.compile(r"[\w.-]+")
_REMARKS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_PARTS = _REMARKS | {"type", "properties", "required", "additionalProperties", "$schema", "$defs", "definitions"}
_DEFINITIONS = ("$defs", "definitions")
_SCALARS = {"string", "integer", "number", "boolean", "null"}


def tags_of(template: ChatTemplate) -> Tags | None:
    """None where a template shows no calls in tags."""
    source = template.tool_source or template.source
    return next((tags for mark, tags in _TAGS.items() if mark in source), None)


class TaggedForms(CallForms):
    def __init__(self, tags: Tags, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__(tags.mark, "\n", tokenizer, tools)
        self._tags = tags

    def _rest(self, one_call: bool) -> Iterator[str]:
        told = [(tool, _in_tags(self._tags, tool)) for tool in self._tools]
        choices = [rule for _, rule in told if rule is not None]
        if objects := [tool for tool, rule in told if rule is None]:
            choices.append('"\\n"? object "\\n"?')
            yield f"object: {json_in_lark(call_object(objects))}"
        if self._tags.head:
            yield f"plain[lazy]: /(.|\\n)*/ {quoted(self._tags.close.strip())}"
            yield r'KEY: /[^<>"\n]+/'
        yield f"rest: ({' | '.join(choices)}) {self._mark(self._tags.end)}"


def _in_tags(tags: Tags, tool: Tool) -> str | None:
    """A call with values in tags. None where these cannot be held to all that the schema asks for."""
    name = tool.function.name
    values = _values(tags, tool.function.parameters or {}) if tags.head and _NAME.fullmatch(name) else None
    if values is None:
        return None
    return " ".join([quoted(tags.head.format(name)), *values, *([quoted(tags.tail)] if tags.tail else [])])


def _values(tags: Tags, schema: Mapping[str, Any]) -> list[str] | None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= _PARTS or schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
        return None
    if not isinstance(required, list) or not all(isinstance(key, str) and key in properties for key in required):
        return None
    if not properties:
        if schema.get("additionalProperties") is False:
            return []
        before, after = map(quoted, tags.key.split("{}"))
        return [f'({before} KEY {after} plain "\\n")*'] if schema.get("additionalProperties", True) is True else None
    values = []
    for key, part in properties.items():
        value = _value(tags, part, schema) if _NAME.fullmatch(key) and isinstance(part, Mapping) else None
        if value is None:
            return None
        values.append(f'({quoted(tags.key.format(key))} {value} "\\n"){"" if key in required else "?"}')
    return values


def _value(tags: Tags, part: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """A value and what closes it."""
    whole, types = _resolved(part, schema), types_of(part, schema)
    if _is_free(whole, types):
        return "plain"
    if "string" in types:
        texts = _texts(tags, whole, schema)
        return None if texts is None else f"({' | '.join(map(quoted, texts))}) {quoted(tags.close)}"
    alone = {**part, **{key: schema[key] for key in _DEFINITIONS if key in schema}}
    if not types or not _stands_alone(alone):
        return None
    return f"({json_in_lark(StructuredOutputs(json=alone))}) {quoted(tags.close)}"


def _is_free(part: Mapping[str, Any], types: set[str]) -> bool:
    """Whether any text is a value of it, whatever it reads as."""
    keys = part.keys() - _REMARKS
    if keys == {"anyOf"} and isinstance(part["anyOf"], list):
        keys = {key for each in part["anyOf"] if isinstance(each, Mapping) for key in each.keys() - _REMARKS}
    return keys == {"type"} and "string" in types and types <= _SCALARS


def _resolved(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the schema has where a part is a reference alone."""
    if part.keys() - _REMARKS == {"$ref"}:
        for key in _DEFINITIONS:
            defined = schema.get(key)
            name = str(part["$ref"]).removeprefix(f"#/{key}/")
            if isinstance(defined, Mapping) and isinstance(found := defined.get(name), Mapping):
                return found
    return part


def _texts(tags: Tags, part: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str] | None:
    """Of a value that is one of some; None where it is not, or is not read as what it is."""
    if not part.keys() - _REMARKS <= {"type", "enum", "const"}:
        return None
    options = [part["const"]] if "const" in part else part.get("enum")
    if not isinstance(options, list):
        return None
    texts = [option if isinstance(option, str) else json.dumps(option) for option in options]
    for option, text in zip(options, texts, strict=True):
        read = json.dumps(json.loads(typed(text, part, schema)))
        if not text or text != text.strip() or tags.close.strip() in text or read != json.dumps(option):
            return None
    return texts


def _stands_alone(schema: Any) -> bool:
    """Whether all references in it are to its own definitions."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            reference = part.get("$ref", "#/$defs/")
            if "$id" in part or not (
                isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/"))
            ):
                return False
            left += part.values()
        elif isinstance(part, list):
            left += part
    return True
