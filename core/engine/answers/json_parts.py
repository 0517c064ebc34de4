"""JSON, and Python's literals, that are read while they come: what has been read is not read again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

BLANK = re.compile(r"\s*")
SPACE = re.compile(r"[\s;,]*")
_ATOM_END = re.compile(r"[\s,}\]]")
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_BETWEEN_IN_PYTHON = re.compile(r"""[^"'{}\[\]()]*""")
_WITHIN = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # a string
_WITHIN_SINGLE = re.compile(r"[^'\\]*(?:\\.[^'\\]*)*", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")


Tools = Mapping[str, Mapping[str, Any]]
"""Names of tools that may be called, each with the JSON schema of its parameters."""


@dataclass(frozen=True)
class PartialCall:
    """A call, and its arguments as the model has written them so far; ``id`` where it has named the call itself."""

    name: str
    arguments: str
    id: str = ""


class Value:
    """Where the value that begins at ``start`` ends: balanced, whatever else is wrong with it. ``python``: it is of that
    language, and nests."""

    def __init__(self, start: int, python: bool = False) -> None:
        self.start = start
        self._python = python
        self._end: int | None = None
        self._at, self._depth, self._quote = start, 0, ""

    def end(self, text: str) -> int | None:
        """None where it has not come; ``text`` is that of the time before, or more."""
        if self._end is None:
            nests = self._python or text.startswith(("{", "[", '"'), self.start)
            self._end = self._balanced(text) if nests else self._atom(text)
        return self._end

    def _atom(self, text: str) -> int | None:
        found = _ATOM_END.search(text, self._at)
        self._at = len(text)
        return found.start() if found else None

    def _balanced(self, text: str) -> int | None:
        between = _BETWEEN_IN_PYTHON if self._python else _BETWEEN
        while True:
            pattern = {"": between, '"': _WITHIN, "'": _WITHIN_SINGLE}[self._quote]
            at = self._at = pattern.match(text, self._at).end()  # type: ignore[union-attr]
            mark = text[at : at + 1]
            if mark in ("", "\\"):  # whatever follows has not come
                return None
            self._at += 1
            if mark in "\"'":
                self._quote = "" if self._quote else mark
            else:
                self._depth += 1 if mark in "{[(" else -1
            if self._depth <= 0 and not self._quote:
                return self._at


class CallObject:
    """The JSON object of a call, which begins at ``start``."""

    def __init__(self, start: int) -> None:
        self._whole = Value(start)
        self._at = start + 1
        self._key: Value | None = None
        self._named: str | None = None
        """What the key says, once it has come."""
        self._value: Value | None = None
        self._name: str | None = None
        self._arguments: str | None = None

    def read(self, text: str, known: Tools) -> tuple[PartialCall | None, int | None]:
        """The call, and where its object ends, None if it has not yet; it ends, too, where neither a member nor its brace
        follows, which some leave out. No call where its name is not known, or not there yet. ``text`` is that of the time
        before, or more."""
        while (value := self._next(text)) is not None and (stop := value.end(text)) is not None:
            self._take(text[value.start : stop])
            self._at, self._key, self._named, self._value = stop, None, None, None
        broken = self._broken(text)
        end = self._at if broken else self._whole.end(text)
        arguments = self._arguments
        if arguments is None and value is not None and self._named in _ARGUMENTS and text.startswith("{", value.start):
            arguments = text[value.start :]
        if self._name is None or self._name not in known or (arguments is None and (broken or end is None)):
            return None, end
        return PartialCall(self._name, arguments if arguments is not None else "{}"), end

    def _broken(self, text: str) -> bool:
        """Whether what stands at ``_at`` is no part of the object."""
        return self._key is None and text[self._at : self._at + 1] not in ("", "}")

    def _next(self, text: str) -> Value | None:
        """The value of the member that is being read. None where it has not begun, or no member follows."""
        if self._value is None and self._has_key(text):
            colon = BLANK.match(text, self._at).end()  # type: ignore[union-attr]
            start = BLANK.match(text, colon + 1).end()  # type: ignore[union-attr]
            if text.startswith(":", colon) and start < len(text):
                self._value = Value(start)
        return self._value

    def _has_key(self, text: str) -> bool:
        """Whether a key has come; then it ends at ``_at``."""
        if self._named is not None:
            return True
        if self._key is None:
            self._at = SPACE.match(text, self._at).end()  # type: ignore[union-attr]
            if not text.startswith('"', self._at):
                return False
            self._key = Value(self._at)
        stop = self._key.end(text)
        if stop is None:
            return False
        try:
            self._named, self._at = scanstring(text, self._key.start + 1, False)
        except ValueError:
            return False
        return True

    def _take(self, value: str) -> None:
        """A member has come whole."""
        if self._named in _NAMES and self._name is None and value.startswith('"'):
            self._name = _string(value)
        elif self._named in _ARGUMENTS and self._arguments is None and value != "null":
            # Some write the object as a string; whatever else stands there is the caller's to refuse.
            self._arguments = _string(value) if value.startswith('"') else value


def as_json(value: Any) -> str:
    """A value that the model has written in another notation. ValueError and TypeError where JSON, or a text, has none such."""
    said = json.dumps(value, ensure_ascii=False, allow_nan=False)
    said.encode()  # half of a surrogate pair is no text
    return said


def _string(text: str) -> str:
    """What a JSON string says, or itself where its escapes are none."""
    try:
        said = str(json.loads(text, strict=False))
        said.encode()  # half of a surrogate pair is no text
        return said
    except ValueError:
        return text
