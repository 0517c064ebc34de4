"""Gemma 4's calls: call:NAME{key:value,...}, in a notation of their own, whose texts stand between marks."""

from __future__ import annotations

import json
import re

from .json_parts import PartialCall, Tools, as_json
from .named_calls import after

GEMMA = "<|tool_call>"
"""The mark before them; what closes them says nothing new."""
_QUOTE = '<|"|>'
_NESTS = re.compile(r'<\|"\|>|[{}\[\]]')
_PART = re.compile(r'\s*(?:<\|"\|>(?P<text>.*?)<\|"\|>|(?P<mark>[{}\[\],:])|(?P<atom>[^{}\[\],:]+))', re.DOTALL)
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class GemmaCall:
    """The call that may begin at ``start``; it is one once it is whole. Where none does, it ends at ``before``."""

    def __init__(self, before: int, start: int) -> None:
        self._before, self._start = before, start
        self._name = ""
        self._first = self._at = 0
        """Where its arguments begin, and where no bracket has been looked for yet."""
        self._depth, self._quoted = 0, False

    def read(self, text: str, known: Tools) -> tuple[PartialCall | None, int | None]:
        """As that of ``CallObject``."""
        if not self._name:
            heads = {f"call:{name}{{": name for name in known}
            end = after(text, self._start, heads)
            if end is None or end == self._start:
                return None, None if end is None else self._before
            self._name = heads[text[self._start : end]]
            self._first = self._at = end - 1
        end = self._end(text)
        written = None if end is None else _arguments(text[self._first : end])
        return None if written is None else PartialCall(self._name, written), end

    def _end(self, text: str) -> int | None:
        """Where its brackets are balanced; None where that has not come."""
        while (found := _NESTS.search(text, self._at)) is not None:
            self._at = found.end()
            if found.group() == _QUOTE:
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if found.group() in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = max(self._at, len(text) - len(_QUOTE) + 1)
        return None


def _arguments(written: str) -> str | None:
    """The object as JSON; None where it is none."""
    parts = [match for match in _PART.finditer(written) if match.group().strip()]
    try:
        value, rest = _value(parts, 0)
        return as_json(value) if rest == len(parts) else None
    except (ValueError, IndexError, RecursionError):
        return None


def _value(parts: list[re.Match[str]], at: int) -> tuple[object, int]:
    """The value whose first part is at ``at``, and where the next one begins. ValueError and IndexError where there is none."""
    mark = parts[at]["mark"]
    if mark is None:
        return _plain(parts[at]), at + 1
    if mark not in "{[":
        raise ValueError(mark)
    close, members, values = "}" if mark == "{" else "]", {}, []
    at += 1
    while parts[at]["mark"] != close:
        key = ""
        if mark == "{":
            key, colon = parts[at]["text"] or (parts[at]["atom"] or "").strip(), parts[at + 1]["mark"]
            if colon != ":":
                raise ValueError(colon)
            at += 2
        value, at = _value(parts, at)
        members[key] = value
        values.append(value)
        if parts[at]["mark"] == ",":
            at += 1
        elif parts[at]["mark"] != close:
            raise ValueError(parts[at].group())
    return members if mark == "{" else values, at + 1


def _plain(part: re.Match[str]) -> object:
    """A text between marks, or what JSON or Python has without any; anything else is a text, too."""
    if part["text"] is not None:
        return part["text"]
    atom = part["atom"].strip()
    try:
        return json.loads(_PYTHON.get(atom, atom))
    except ValueError:
        return atom
