"""Tool calls in a model's text, in the forms that the field's models are trained to write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from typing import Any

from .conversation import ToolCall

_TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)  # Hermes, Qwen
_LISTED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])\s*$", re.DOTALL)  # Mistral


def parse_calls(text: str, known: Set[str]) -> tuple[tuple[ToolCall, ...], str]:
    """The calls of ``known`` tools, and the text without them. JSON that is no call of a known tool stays text."""
    if not known or "{" not in text:
        return (), text
    if found := list(_TAGGED.finditer(text)):
        calls = tuple(call for match in found for call in _calls(match[1], known))
        return (calls, _TAGGED.sub("", text).strip()) if len(calls) == len(found) else ((), text)
    if listed := _LISTED.search(text):
        calls = tuple(_calls(listed[1], known))
        return (calls, text[: listed.start()].strip()) if calls else ((), text)
    calls = tuple(_calls(text.strip().removeprefix("<|python_tag|>"), known))  # Llama 3
    return (calls, "") if calls else ((), text)


def _calls(text: str, known: Set[str]) -> Iterator[ToolCall]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    for number, call in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(call, dict) and call.get("name") in known:
            arguments: Any = call.get("arguments", call.get("parameters", {}))
            # Mistral's templates ask for ids of nine characters
            yield ToolCall(f"call{number:05}", call["name"], json.dumps(arguments, ensure_ascii=False))
