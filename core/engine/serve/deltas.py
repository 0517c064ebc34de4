"""What is new of an answer, in the form of OpenAI's streams."""

from __future__ import annotations

import json
import secrets
from collections.abc import Container
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from engine.answers import Parts


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
                self.ids.append(call_id(call.id, self.ids))
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"index": index, "id": self.ids[index], "type": "function", "function": function})
            elif new := call.arguments[len(before.calls[index].arguments) :]:
                calls.append({"index": index, "function": {"arguments": new}})
        return delta | ({"tool_calls": calls} if calls else {})


def call_id(own: str = "", taken: Container[str] = ()) -> str:
    """What the model has named the call, which its template needs again, where that tells it from those of ids that are
    ``taken``; else nine letters and digits, which Mistral's templates ask for."""
    return own if own and own not in taken else secrets.token_hex(5)[:9]


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments for protocols that have them as an object, such as JSON can hold: no number where it is not finite.
    Empty where a call was cut short, or the model has written something else."""
    try:
        found = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
        found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))  # half a surrogate pair
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _finite(number: str) -> float | None:
    return value if isfinite(value := float(number)) else None
