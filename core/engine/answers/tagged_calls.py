"""Calls in tags: Qwen3-Coder's and Seed-OSS's <function=NAME>, GLM 4.5's <arg_key>, MiniMax M2's <invoke name="NAME">. Their
values are plain text, whose types the tool's schema tells."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .json_parts import PartialCall, Tools, Value, as_json
from .named_calls import after

FUNCTION, SEED, MINIMAX = "<function=", "<seed:tool_call>", "<minimax:tool_call>"
"""The marks before them, beside that of Hermes; some leave out all but the first."""


@dataclass(frozen=True)
class Form:
    """``head`` has the tool's name in it; ``key`` is what comes before a value, ``close`` what ends it; ``end`` ends the call.
    ``stems``: what else may begin where ``key`` or ``end`` is awaited."""

    head: str
    key: re.Pattern[str]
    close: str
    end: re.Pattern[str]
    stems: tuple[str, ...]


_OTHERS = r"(?=</tool_call>|<tool_call>|</seed:tool_call>|<function=)"
_FUNCTION = Form(
    FUNCTION + "{}>",
    re.compile(r"\s*<parameter=([^>]+)>"),
    "</parameter>",
    re.compile(rf"\s*(?:</function>|{_OTHERS})"),
    ("<parameter=", "</function>", "</tool_call>", "<tool_call>", "</seed:tool_call>", FUNCTION),
)
_INVOKE = Form(
    '<invoke name="{}">',
    re.compile(r'\s*<parameter name="([^">]+)">'),
    "</parameter>",
    re.compile(r"\s*</invoke>"),
    ('<parameter name="', "</invoke>"),
)
_KEYS = Form(
    "{}",
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(r"\s*(?=</tool_call>)"),
    ("<arg_key>", "</tool_call>"),
)


def tagged_call(mark: str, text: str, before: int, start: int) -> TaggedCall | None:
    """What may be such a call at ``start``, behind a mark that ends at ``before``; None where nothing like it has begun."""
    if mark == FUNCTION:
        return TaggedCall(before, before - len(FUNCTION), _FUNCTION)
    if mark == MINIMAX:
        return TaggedCall(before, start, _INVOKE)
    function = after(text, start, (FUNCTION,))
    if mark == SEED or function is None or function > start:
        return TaggedCall(before, start, _FUNCTION)
    return TaggedCall(before, start, _KEYS)


class TaggedCall:
    """The call that may begin at ``start``. Where none does, it ends at ``before``."""

    def __init__(self, before: int, start: int, form: Form) -> None:
        self._before, self._start, self._form = before, start, form
        self._name: str | None = None
        self._at = start
        """Where the next key, or the end, is awaited."""
        self._key: re.Match[str] | None = None
        self._sought = 0
        """Where the value's end has not been looked for yet."""
        self._has_strings = False
        """Whether the value is JSON, in whose strings its end may be written."""
        self._string: Value | None = None
        self._members: list[str] = []

    def read(self, text: str, known: Tools) -> tuple[PartialCall | None, int | None]:
        """As that of ``CallObject``. Arguments grow by whole values."""
        if self._name is None:
            heads = {self._form.head.format(name): name for name in known}
            end = after(text, self._start, heads)
            if end is None or end == self._start:
                return None, None if end is None else self._before
            self._name, self._at = heads[text[self._start : end]], end
        self._read_values(text, known[self._name])
        if self._key is not None:
            return self._call(whole=False), None
        if (end_mark := self._form.end.match(text, self._at)) is not None:
            return self._call(whole=True), end_mark.end()
        if self._may_go_on(text):
            begun = self._form.head != "{}" or self._members  # a name alone may be text
            return self._call(whole=False) if begun else None, None
        return (self._call(whole=True), self._at) if self._members else (None, self._before)

    def _read_values(self, text: str, schema: Mapping[str, Any]) -> None:
        """All that have come whole."""
        while True:
            if self._key is None:
                self._key = self._form.key.match(text, self._at)
                if self._key is None:
                    return
                self._sought = self._key.end()
                types = types_of(_part(schema, self._key.group(1)), schema)
                self._has_strings = bool(types) and "string" not in types
            end = self._closed(text)
            if end < 0:
                return
            name, value = self._key.group(1), text[self._key.end() : end].removeprefix("\n").removesuffix("\n")
            self._members.append(f"{_said(name)}: {typed(value, _part(schema, name), schema)}")
            self._key, self._at = None, end + len(self._form.close)

    def _closed(self, text: str) -> int:
        """Where the value's end begins; -1 where it has not come."""
        close = self._form.close
        while True:
            if self._string is not None:
                stop = self._string.end(text)
                if stop is None:
                    return -1
                self._sought, self._string = stop, None
            end = text.find(close, self._sought)
            before = len(text) if end < 0 else end
            quote = text.find('"', self._sought, before) if self._has_strings else -1
            if quote < 0:
                self._sought = max(self._sought, before - len(close) + 1)
                return end
            self._string = Value(quote)

    def _may_go_on(self, text: str) -> bool:
        rest = text[self._at :].lstrip()
        return any(stem.startswith(rest) for stem in self._form.stems) or rest.startswith(self._form.stems[0])

    def _call(self, whole: bool) -> PartialCall:
        assert self._name is not None
        return PartialCall(self._name, "{" + ", ".join(self._members) + ("}" if whole else ""))


def _said(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _part(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    part = properties.get(name) if isinstance(properties, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def typed(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """The JSON of a value: of a type that its schema, a part of ``root``, allows, and a text otherwise. Without a schema it is
    what it reads as."""
    allowed = types_of(schema, root)
    if allowed == {"string"}:
        return _said(text)
    written = text.strip()
    if "boolean" in allowed and written in ("True", "False"):  # some write Python's
        return written.lower()
    try:
        kind = _type_of(json.loads(written, parse_constant=_none))
    except (ValueError, RecursionError):
        return _in_python(written, allowed) or _said(text)
    if kind == "integer" and "number" in allowed:
        return written
    return written if (kind in allowed if allowed else kind != "string") else _said(text)


def _in_python(written: str, allowed: set[str]) -> str | None:
    """The JSON of a list or a dict in that language, as some templates show them, where no text is allowed."""
    if not allowed & {"array", "object"} or "string" in allowed:
        return None
    try:
        value = ast.literal_eval(written)
        return as_json(value) if _type_of(value) in allowed else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _none(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def types_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    """The types that a schema, a part of ``root``, names; empty where it may be of any."""
    found: set[str] = set()
    seen: set[str] = set()
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and isinstance(reference := part.get("$ref"), str):
            if reference not in seen:
                seen.add(reference)
                left.append(_referred(reference, root))
            continue
        types = _named(part) if isinstance(part, Mapping) else set()
        several = [each for key in _SEVERAL for each in _listed(part.get(key))] if isinstance(part, Mapping) else []
        if not types and not several:
            return set()
        found |= types
        left += [] if types else several
    return found


_SEVERAL = ("anyOf", "oneOf", "allOf")


def _named(part: Mapping[str, Any]) -> set[str]:
    """The types of a schema by itself."""
    named = part.get("type")
    found = {kind for kind in (named, *_listed(named)) if isinstance(kind, str)}
    return found or {_type_of(option) for option in ([part["const"]] if "const" in part else _listed(part.get("enum")))}


def _referred(reference: str, root: Any) -> Any:
    """What a reference within ``root`` is to; None where it is to nothing there."""
    first, *steps = reference.split("/")
    found = root if first == "#" else None
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
