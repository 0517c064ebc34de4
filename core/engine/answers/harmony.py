"""OpenAI's harmony format, in which gpt-oss answers: messages, each with a header that names its channel and, of a call, whom it
is to. The channel analysis holds thoughts, final what is to be read, commentary calls and what is said before them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .json_parts import PartialCall, Tools
from .reasoning import begun_mark

if TYPE_CHECKING:
    from engine.formats.tokenizer import Tokenizer

_MESSAGE, _CHANNEL = "<|message|>", "<|channel|>"
_MARKS = (_MESSAGE, _CHANNEL, "<|start|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
_END = re.compile(r"<\|(?:end|return|call|start)\|>")
_NAMED = re.compile(re.escape(_CHANNEL) + r"\s*([\w-]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FINAL = f"{_CHANNEL}final{_MESSAGE}"
"""The header of what is to be read, for a prompt whose answer is that alone."""
_HEADS = ("<|", "to=")
_FUNCTIONS = "functions."


def speaks_harmony(tokenizer: Tokenizer) -> bool:
    """Whether its marks are special tokens: the format can be told only in a text that shows these."""
    return all(tokenizer.token_id(mark) in tokenizer.control_ids for mark in (_CHANNEL, _MESSAGE))


@dataclass(frozen=True)
class Message:
    """What has come of one. ``name`` is of the tool that a call is to."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    name: str = ""


class HarmonyReading:
    """One answer, read again and again while it comes. ``known``: names of the tools that may be called; what is to anyone else
    is content."""

    def __init__(self, known: Tools) -> None:
        self._known = known
        self._closed: list[Message] = []
        self._messages: list[Message] = []
        """Those of the last time, with the one that is open."""
        self._at = 0
        """Where the message that is still open begins."""

    def read(self, text: str, finished: bool) -> tuple[str, str, tuple[PartialCall, ...]]:
        """Reasoning, content and calls; ``text`` is that of the time before, or more."""
        opened: list[Message] = []
        while not opened and (found := self._message(text, finished)) is not None:
            message, end = found
            if end is None:
                opened.append(message)
            else:
                self._closed.append(message)
                self._at = end
        self._messages = [*self._closed, *opened]
        return _together(self._messages)

    def in_order(self, one_call: bool) -> tuple[Message, ...]:
        """What was read, as it came: messages of a kind that follow each other are one."""
        found: list[Message] = []
        for message in self._messages:
            if message.kind == "call":
                if not one_call or all(other.kind != "call" for other in found):
                    found.append(message)
            elif message.text.strip():
                joined = found and found[-1].kind == message.kind
                found.append(Message(message.kind, f"{found.pop().text}\n\n{message.text}") if joined else message)
        return tuple(replace(one, text=one.text.strip()) if one.kind == "reasoning" else one for one in found)

    def _message(self, text: str, finished: bool) -> tuple[Message, int | None] | None:
        """The message from where the last one ended, and its end if that has come; None where its header has not."""
        start, header = self._at, ""
        if not self._bare(text, finished):
            begin = text.find(_MESSAGE, start)
            if begin < 0:
                return None
            start, header = begin + len(_MESSAGE), text[start:begin]
        end = _END.search(text, start)
        body = text[start : end.start()] if end else text[start:]
        if end is None and not finished:
            body = body[: len(body) - begun_mark(body, _MARKS)]
        # what follows an end is the next header, which begins with the mark of a start
        return self._of(header, body), None if end is None else end.end()

    def _bare(self, text: str, finished: bool) -> bool:
        """Whether the answer begins without a header, as where the prompt has ended with one."""
        begun = text.lstrip()
        if self._at > 0 or not begun:
            return False
        may_become = not finished and any(head.startswith(begun) for head in _HEADS)
        return not may_become and not begun.startswith(_HEADS)

    def _of(self, header: str, body: str) -> Message:
        channel, recipient = _NAMED.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            name = recipient.group(1).removeprefix(_FUNCTIONS)
            return Message("call", body.strip(), name) if name in self._known else Message("content", body)
        return Message("reasoning" if channel and channel.group(1) == "analysis" else "content", body)


def _together(messages: list[Message]) -> tuple[str, str, tuple[PartialCall, ...]]:
    texts = {
        kind: "\n\n".join(message.text for message in messages if message.kind == kind and message.text.strip())
        for kind in ("reasoning", "content")
    }
    calls = tuple(PartialCall(message.name, message.text) for message in messages if message.kind == "call")
    return texts["reasoning"].strip(), texts["content"], calls
