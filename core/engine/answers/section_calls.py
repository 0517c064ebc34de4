"""Calls between marks of their own, DeepSeek's and Kimi K2's: a head with the tool's name, and JSON. What closes them says
nothing new."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .json_parts import BLANK, PartialCall, Tools, Value
from .named_calls import after


@dataclass(frozen=True)
class Form:
    """``section`` comes before the first call, ``begin`` before each; some leave out one of them. ``heads`` have the tool's
    name in them; where ``argued`` comes before the arguments, a number follows the head, and both are the call's id."""

    section: str
    begin: str
    heads: tuple[str, ...]
    argued: str = ""


_FORMS = (
    Form(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        ("{}<｜tool▁sep｜>", "function<｜tool▁sep｜>{}\n```json"),
    ),
    Form(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        ("functions.{}:", "{}:"),
        "<|tool_call_argument_begin|>",
    ),
)
SECTIONS = {mark: form for form in _FORMS for mark in (form.section, form.begin)}
"""Forms by the marks before their calls."""
_NUMBER = re.compile(r"\d*")


class SectionCall:
    """The call that may begin at ``start``. Where none does, it ends at ``before``."""

    def __init__(self, before: int, start: int, form: Form) -> None:
        self._before, self._start, self._form = before, start, form
        self._name = self._id = ""
        self._arguments: Value | None = None

    def read(self, text: str, known: Tools) -> tuple[PartialCall | None, int | None]:
        """As that of ``CallObject``."""
        if self._arguments is None:
            at = self._opened(text, known)
            if at is None:
                return None, None
            if not self._name or not text.startswith("{", at):
                return None, self._before
            self._arguments = Value(at)
        value, end = self._arguments, self._arguments.end(text)
        return PartialCall(self._name, text[value.start : end], self._id), end

    def _opened(self, text: str, known: Tools) -> int | None:
        """Where the arguments would begin, of a call by ``_name``; None where that has not come."""
        start = after(text, self._start, (self._form.begin,))
        start = None if start is None else _beyond(BLANK, text, start)
        if start is None:
            return None
        heads = {head.format(name): name for name in known for head in self._form.heads}
        at = after(text, start, heads)
        if at is None:
            return None
        self._name = heads.get(text[start:at], "")
        if self._name and self._form.argued:
            at = self._argued(text, start, at)
        return None if at is None else _beyond(BLANK, text, at)

    def _argued(self, text: str, start: int, at: int) -> int | None:
        """As ``_opened``, behind the number at ``at`` and the mark behind that; the head begins at ``start``."""
        end = _beyond(_NUMBER, text, at)
        mark = None if end is None else _beyond(BLANK, text, end)
        if mark is None:
            return None
        self._id = text[start:end]
        return after(text, mark, (self._form.argued,))


def _beyond(pattern: re.Pattern[str], text: str, at: int) -> int | None:
    """Where what matches at ``at`` ends; None where more of it may be coming."""
    end = pattern.match(text, at).end()  # type: ignore[union-attr]
    return None if end == len(text) else end
