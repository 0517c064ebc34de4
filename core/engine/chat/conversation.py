"""A conversation as plain data: its messages, and which part of them the model is shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SUMMARY_REQUEST = (
    "Summarize our conversation so far in a few sentences. Keep names, numbers, decisions and open questions; leave out"
    " everything else, and add nothing."
)
_REASONING = "reasoning"
_SUMMARY_INTRODUCTION = "A summary of our conversation so far:\n"
_SUMMARY_REPLY = "Thank you, I go on from there."


@dataclass(frozen=True)
class ToolCall:
    """A function that the model asks to have run. ``arguments`` is the JSON object's text, as the model wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object: those of a call that was cut are none."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False

    def wire(self) -> dict[str, Any]:
        """In the form of OpenAI's messages."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class Message:
    """``content`` is what the model is shown again; ``reasoning`` what was given apart from it."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def wire(self) -> dict[str, Any]:
        """In the form of OpenAI's messages, and with its reasoning, as templates take them."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message[_REASONING] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.wire() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def extra(self) -> str:
        """What is beside role and content, as JSON; empty if there is nothing."""
        found: dict[str, Any] = {}
        if self.reasoning:
            found["reasoning"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [[call.id, call.name, call.arguments] for call in self.tool_calls]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        return json.dumps(found, ensure_ascii=False) if found else ""

    @classmethod
    def restored(cls, role: str, content: str, extra: str) -> Message:
        """The inverse of ``extra``."""
        found = json.loads(extra) if extra else {}
        calls = tuple(ToolCall(*call) for call in found.get("tool_calls", ()))
        return cls(role, content, found.get("reasoning", ""), calls, found.get("tool_call_id"))


@dataclass
class Conversation:
    """``messages[start:]`` are shown to the model, after the system message and the summary of those before."""

    model: str = ""
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    start: int = 0
    summary: str | None = None
    title: str = ""
    id: int | None = None

    def sent(self) -> list[dict[str, Any]]:
        """What the model is shown."""
        shown = [Message("system", self.system)] if self.system else []
        if self.summary is not None:
            shown += [
                Message("user", _SUMMARY_INTRODUCTION + self.summary),
                Message("assistant", _SUMMARY_REPLY),
            ]
        return [message.wire() for message in (*shown, *_sendable(self.messages[self.start :]))]

    def turns(self) -> list[int]:
        """Where each turn begins, among the messages that the model is shown."""
        return [i for i in range(self.start, len(self.messages)) if self.messages[i].role == "user"]

    def last_turn(self) -> int | None:
        """Where the last turn begins, whether or not the model is shown it; None if there is none."""
        return max((i for i, message in enumerate(self.messages) if message.role == "user"), default=None)

    def undo(self) -> str | None:
        """Take the last turn back, and give what the person had said in it; None if there is none."""
        begin = self.last_turn()
        if begin is None:
            return None
        said = self.messages[begin].content
        del self.messages[begin:]
        if self.start > len(self.messages):
            self.start, self.summary = 0, None
        return said

    def name(self) -> str:
        """Its title, or else the beginning of what was said first."""
        first = next((m.content for m in self.messages if m.role == "user"), "")
        return self.title or " ".join(first.split())[:60]


def without_reasoning(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As servers take them, some of which refuse it."""
    return [{key: value for key, value in message.items() if key != _REASONING} for message in messages]


def with_calls(text: str, calls: Iterable[ToolCall]) -> str:
    """A text, and below it calls that cannot be run, as they are shown and kept."""
    return "\n".join(filter(None, (text, *(f"{call.name} {call.arguments}" for call in calls))))


def _sendable(messages: Iterable[Message]) -> Iterator[Message]:
    """As servers and templates take them. They refuse calls without a JSON object, which conversations of before may hold:
    these become text, and what was told about them is left out."""
    cut: set[str] = set()
    for message in messages:
        if message.tool_calls:
            whole = all(call.is_whole for call in message.tool_calls)
            cut = set() if whole else {call.id for call in message.tool_calls}
        if message.tool_call_id in cut:
            continue
        if message.tool_calls and cut:
            yield replace(message, content=with_calls(message.content, message.tool_calls), tool_calls=())
        else:
            yield message
