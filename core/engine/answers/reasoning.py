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
}
"""What opens it and what closes it: of most families, of Mistral's, of Seed-OSS, of Gemma 4."""
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
        return "", text, False
    if (end := close.search(body)) is not None:
        return body[: end.start()].strip(), body[end.end() :].lstrip("\n"), False
    held = 0 if finished else begun_mark(body, MARKS.values())
    return body[: len(body) - held].strip(), "", True


def begun_mark(text: str, marks: Iterable[str]) -> int:
    """The length of what may become a mark at the end of a text."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
