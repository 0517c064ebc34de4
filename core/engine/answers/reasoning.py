"""Reasoning at the beginning of an answer, between the marks of its family."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.formats.tokenizer import Tokenizer

MARKS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""What opens it and what closes it: of most families, of Mistral's, of Seed-OSS, of Gemma 4, of Cohere's."""
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
"""Around what follows it in Cohere's answers."""
_CLOSE = re.compile("|".join(map(re.escape, MARKS.values())))


def open_mark(prompt: str) -> str:
    """The mark that a prompt ends with, so that the answer goes on within the reasoning; empty if it does not."""
    return next((mark for mark in MARKS if prompt.rstrip().endswith(mark)), "")


def closes_reasoning(text: str) -> bool:
    return _CLOSE.search(text) is not None


def reasons(template: str) -> bool:
    """Whether a chat template knows a mark of reasoning."""
    return any(mark in template for mark in MARKS)


def thoughts_are_special(tokenizer: Tokenizer) -> bool:
    """Whether reasoning can be told only in a text that shows special tokens."""
    return any(tokenizer.token_id(mark) in tokenizer.control_ids for pair in MARKS.items() for mark in pair)


def split_reasoning(text: str, inside: bool, finished: bool) -> tuple[str, str, bool]:
    """The reasoning at the beginning of a text and what follows it, as far as both are certain, and whether the reasoning still
    goes on. ``inside``: the prompt ended in an open block."""
    body, close = text.lstrip(), _CLOSE
    opened = next((mark for mark in MARKS if body.startswith(mark)), None)
    if opened is not None:
        body, close = body[len(opened) :], re.compile(re.escape(MARKS[opened]))
    elif not finished and any(mark.startswith(body) for mark in MARKS):  # it may become the mark
        return "", "", inside or bool(body)
    elif not inside:
        return "", _response(text, finished), False
    if (end := close.search(body)) is not None:
        return body[: end.start()].strip(), _response(body[end.end() :].lstrip("\n"), finished), False
    held = 0 if finished else begun_mark(body, MARKS.values())
    return body[: len(body) - held].strip(), "", True


def _response(text: str, finished: bool) -> str:
    """What lies between the marks of a response, as far as it is certain, or the text that has none."""
    (opens, closes), body = _RESPONSE, text.lstrip()
    if not body.startswith(opens):
        return "" if not finished and opens.startswith(body) else text
    response, closed, _ = body[len(opens) :].partition(closes)
    held = 0 if finished or closed else begun_mark(response, (closes,))
    return response[: len(response) - held]


def begun_mark(text: str, marks: Iterable[str]) -> int:
    """The length of what may become a mark at the end of a text."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
