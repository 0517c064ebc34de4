"""The form of a call as an object in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.sampling import StructuredOutputs

from .fields import Tool


def call_object(tools: Sequence[Tool]) -> StructuredOutputs:
    return StructuredOutputs(json={"anyOf": _calls(tools)})


def call_object_or(schema: dict[str, Any], tools: Sequence[Tool]) -> StructuredOutputs:
    """A call, or what the schema has."""
    return StructuredOutputs(json={"anyOf": [*_calls(tools), _part(schema, "form")]})


def _calls(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [_call(tool, place) for place, tool in enumerate(tools)]


def _call(tool: Tool, place: int) -> dict[str, Any]:
    arguments = _part({"type": "object", **(tool.function.parameters or {})}, f"tool:{place}")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _part(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema that has become a part of another: by an id of its own, its references begin where it does. A draft that it
    names would have it be a whole of its own."""
    return {**{key: value for key, value in schema.items() if key != "$schema"}, "$id": name}
