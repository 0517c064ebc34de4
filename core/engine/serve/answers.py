"""An answer's text taken apart: reasoning, content and tool calls, each of which only ever grows."""

from __future__ import annotations

import secrets
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from engine.chat.answer import CLOSE, OPEN

from .tool_calls import PartialCall, read_calls


@dataclass(frozen=True)
class Parts:
    """All that has come of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[PartialCall, ...] = ()


@dataclass(frozen=True)
class Reader:
    """How answers to a request are read. ``tools``: names of those that may be called; ``inside``: the prompt ended in an
    open block of reasoning; ``plain``: the answer has a form of its own, with no reasoning in it; ``one_call``: no more
    than one call is wanted."""

    tools: Set[str] = frozenset()
    inside: bool = False
    plain: bool = False
    one_call: bool = False

    def read(self, text: str, finished: bool) -> Parts:
        reasoning, rest = ("", text) if self.plain else split_reasoning(text, self.inside, finished)
        if not self.tools:
            return Parts(reasoning, rest)
        content, calls = read_calls(rest, self.tools, finished)
        return Parts(reasoning, content, calls[:1] if self.one_call else calls)


def split_reasoning(text: str, inside: bool, finished: bool) -> tuple[str, str]:
    """The reasoning at the beginning of a text, and what follows it, as far as both are certain."""
    body = text.lstrip()
    if body.startswith(OPEN):
        body = body[len(OPEN) :]
    elif OPEN.startswith(body) and not finished:
        return "", ""
    elif not inside:
        return "", text
    thought, closed, rest = body.partition(CLOSE)
    if closed:
        return thought.strip(), rest.lstrip("\n")
    held = max((n for n in range(1, len(CLOSE)) if thought.endswith(CLOSE[:n])), default=0)
    return (thought if finished else thought[: len(thought) - held]).strip(), ""


@dataclass
class Delta:
    """What of one choice has been streamed, and what is new."""

    sent: Parts = field(default_factory=Parts)
    ids: list[str] = field(default_factory=list)

    def advance(self, parts: Parts) -> dict[str, Any]:
        """The new parts in the form of OpenAI's deltas; empty if there are none."""
        before, self.sent = self.sent, parts
        delta: dict[str, Any] = {}
        if reasoning := parts.reasoning[len(before.reasoning) :]:
            delta["reasoning_content"] = reasoning
        if content := parts.content[len(before.content) :]:
            delta["content"] = content
        calls = []
        for index, call in enumerate(parts.calls):
            if index >= len(before.calls):
                self.ids.append(call_id())
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"index": index, "id": self.ids[index], "type": "function", "function": function})
            elif new := call.arguments[len(before.calls[index].arguments) :]:
                calls.append({"index": index, "function": {"arguments": new}})
        return delta | ({"tool_calls": calls} if calls else {})


def call_id() -> str:
    """Mistral's templates ask for nine letters and digits."""
    return secrets.token_hex(5)[:9]
