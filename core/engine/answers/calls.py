"""Tool calls in an answer while it comes, in the forms that the field's models are trained to write.

What has come of an answer is read anew each time, by rules under which nothing that was given is taken back: so a stream
adds up to the answer that is given whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]

TAG = "<tool_call>"  # Hermes, Qwen; their closing tags say nothing new
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")  # Mistral, Llama 3
_SPACE = re.compile(r"[\s;,]*")
_BLANK = re.compile(r"\s*")
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class PartialCall:
    """A call, and its arguments as the model has written them so far."""

    name: str
    arguments: str


def read_calls(text: str, known: Set[str], finished: bool) -> tuple[str, tuple[PartialCall, ...]]:
    """The text that is certain to be content, and the calls of ``known`` tools that have begun. What cannot be told yet
    is in neither."""
    tagged = text.find(TAG)
    for at, begun in _begun(text):
        if 0 <= tagged < at:
            break
        calls, may_come = _listed(begun, known) if begun else ((), True)
        if calls or (may_come and not finished):
            return text[:at].rstrip(), calls
    if tagged >= 0 and (found := _tagged(text[tagged:], known)):
        return text[:tagged].rstrip(), found
    if finished:
        return text, ()
    if tagged >= 0:
        return text[:tagged].rstrip(), ()
    marks = (TAG, *_MARKS)
    held = max(n for mark in marks for n in range(len(mark)) if text.endswith(mark[:n]))
    return text[: len(text) - held].rstrip(), ()  # space before a call is no content


def _begun(text: str) -> Iterator[tuple[int, str]]:
    """Where calls in JSON may begin, and what stands there, nothing where it has not come: the whole text, or behind a mark."""
    body = text.lstrip()
    at, mark = min(((text.find(mark), mark) for mark in _MARKS if mark in text), default=(-1, ""))
    if body[:1] in ("{", "[") and at != len(text) - len(body):
        yield 0, body
    if at >= 0 and (begun := text[at + len(mark) :].lstrip())[:1] in ("", "{", "["):
        yield at, begun


def _tagged(text: str, known: Set[str]) -> tuple[PartialCall, ...]:
    """Calls between tags; what stands between them otherwise, and calls after the first that are none, are left out."""
    calls: list[PartialCall] = []
    at = 0
    while at >= 0:
        start = _BLANK.match(text, at + len(TAG)).end()  # type: ignore[union-attr]
        call, end = _object(text, start, known)
        if call is not None:
            calls.append(call)
        elif not calls or (end is None and text[start : start + 1] in ("", "{")):  # it may still become one
            break
        if call is not None and end is None:
            break
        at = text.find(TAG, start if end is None else end)
    return tuple(calls)


def _listed(text: str, known: Set[str]) -> tuple[tuple[PartialCall, ...], bool]:
    """Calls in a list or one after the other, and whether what is no call yet may become one."""
    calls: list[PartialCall] = []
    at = 1 if text[0] == "[" else 0
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return tuple(calls), True
        if text[at] != "{":
            return tuple(calls), False
        call, end = _object(text, at, known)
        if call is None:
            return tuple(calls), end is None and _may_grow(text, at)
        calls.append(call)
        if end is None:
            return tuple(calls), True
        at = end


def _may_grow(text: str, at: int) -> bool:
    """Whether a JSON object that begins there has not ended yet."""
    return text.startswith("{", at) and _end_of(text, at) is None


def _object(text: str, at: int, known: Set[str]) -> tuple[PartialCall | None, int | None]:
    """The call whose JSON object begins at ``at``, and where that ends, None if it has not yet. No call where its name
    is not known, or not there yet."""
    if not text.startswith("{", at):
        return None, None
    name: str | None = None
    arguments: str | None = None
    end = _end_of(text, at)
    for key, start, stop in _members(text, at):
        value = text[start:stop]
        if key == "name" and name is None and stop is not None and value.startswith('"'):
            name = _string(value)
        elif key in _ARGUMENTS and arguments is None and value.startswith("{"):
            arguments = value
        elif key in _ARGUMENTS and arguments is None and stop is not None and value != "null":
            # Some write the object as a string; whatever else stands there is the caller's to refuse.
            arguments = _string(value) if value.startswith('"') else value
    if name not in known or (arguments is None and end is None):
        return None, end
    assert name is not None
    return PartialCall(name, arguments if arguments is not None else "{}"), end


def _string(text: str) -> str:
    """What a JSON string says, or itself where its escapes are none."""
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text


def _members(text: str, at: int) -> list[tuple[str, int, int | None]]:
    """The members of an object as far as they have come: key, and where the value begins and ends."""
    found: list[tuple[str, int, int | None]] = []
    at += 1
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if not text.startswith('"', at):
            return found
        try:
            key, at = scanstring(text, at + 1, False)
        except ValueError:
            return found
        at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
        if not text.startswith(":", at):
            return found
        start = _BLANK.match(text, at + 1).end()  # type: ignore[union-attr]
        stop = _end_of(text, start)
        found.append((key, start, stop))
        if stop is None:
            return found
        at = stop


_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]|"', re.DOTALL)
_ATOM = re.compile(r"[^\s,}\]]*(?=[\s,}\]])")


def _end_of(text: str, at: int) -> int | None:
    """Where the JSON value that begins at ``at`` ends, None if it has not."""
    if not text.startswith(("{", "[", '"'), at):
        atom = _ATOM.match(text, at)
        return atom.end() if atom else None
    depth = 0
    for token in _TOKEN.finditer(text, at):
        if token[0] == '"':
            return None
        if token[0] in "{[":
            depth += 1
        elif token[0] in "}]":
            depth -= 1
        if depth <= 0:
            return token.end()
    return None
