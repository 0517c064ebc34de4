"""Calls that begin with the tool's name: Mistral's newer form, and Llama's and LFM2's of Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import ClassVar

from .json_parts import BLANK, PartialCall, Tools, Value, as_json

MISTRAL, PYTHON, LFM2 = "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call_start|>"
"""The marks before them; that of LFM2 before Python's."""
_ID = re.compile(r"\w*")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = "\\'\"abfnrtv0xuUN\n"
"""What Python knows behind a backslash, but for octal numbers."""


class NamedCall:
    """The call that may begin at ``start``: ``name[ARGS]{...}``, with a ``[CALL_ID]`` or without those marks, or, in Python,
    ``name.call(key="value")`` and ``name(key="value")``. Where none does, it ends at ``before``."""

    def __init__(self, before: int, start: int, python: bool) -> None:
        self._before, self._start = before, start
        self._python = python
        self._name = ""
        self._arguments: Value | None = None

    def read(self, text: str, known: Tools) -> tuple[PartialCall | None, int | None]:
        """As that of ``CallObject``; a call in Python is one once it is whole."""
        if self._arguments is None:
            end = after(text, self._start, known)
            at = end if end in (None, self._start) else self._opened(text, end)
            if at is None:
                return None, None
            if not text.startswith("(" if self._python else "{", at):
                return None, self._before
            self._name, self._arguments = text[self._start : end], Value(at, self._python)
        value, end = self._arguments, self._arguments.end(text)
        if not self._python:
            return PartialCall(self._name, text[value.start : end]), end
        written = None if end is None else _keywords(text[value.start : end])
        return None if written is None else PartialCall(self._name, written), end

    def _opened(self, text: str, at: int) -> int | None:
        """Where the arguments of a call whose name ends at ``at`` would begin. None where that has not come."""
        if self._python:
            found = after(text, at, (".call",))
        else:
            found = after(text, at, ("[CALL_ID]",))
            if found not in (None, at):
                found = _ID.match(text, found).end()  # type: ignore[union-attr]
            found = None if found is None else after(text, found, ("[ARGS]",))
            found = None if found is None else BLANK.match(text, found).end()  # type: ignore[union-attr]
        return None if found == len(text) else found


def after(text: str, at: int, words: Iterable[str]) -> int | None:
    """Where the longest of ``words`` that stand at ``at`` ends, ``at`` if there is none; None where one may be coming."""
    rest = len(text) - at
    if any(len(word) > rest and text.startswith(word[:rest], at) for word in words):
        return None
    return at + max((len(word) for word in words if text.startswith(word, at)), default=0)


class _Names(ast.NodeTransformer):
    """JSON's names for what Python calls otherwise, which stand within some lists and dicts."""

    _SAY: ClassVar = {"null": None, "true": True, "false": False}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._SAY[node.id]) if node.id in self._SAY else node


def _keywords(written: str) -> str | None:
    """Arguments as JSON, from a call's brackets on; None where they are not literals by name."""
    source = _ESCAPE.sub(lambda escape: ("" if escape[1] in _ESCAPES else "\\") + escape[0], written)
    try:
        call = ast.parse(f"call{source}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        arguments = {str(keyword.arg): ast.literal_eval(_Names().visit(keyword.value)) for keyword in call.keywords}
        return as_json(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
