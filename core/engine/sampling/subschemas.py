"""The schemas that a JSON schema is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema (JSON, as Python has it) with ``change`` done to each object in it that is a schema, inner ones first."""
    if isinstance(schema, list):
        return [changed(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return change({key: value if key in _VALUES else _parts(key, value, change) for key, value in schema.items()})


def _parts(key: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: changed(one, change) for name, one in value.items()}
    return changed(value, change)
