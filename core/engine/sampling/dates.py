"""Dates of a JSON schema. The parser's formats "date" and "date-time" (RFC 3339) admit a 29th of February in any year, and a year
0, which calendars begin after; schemas are told here to admit neither."""

from __future__ import annotations

from typing import Any

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_BEGINNING = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


def with_real_dates(schema: Any) -> Any:
    """The schema (JSON, as Python has it) with a pattern beside each format that is a date's."""
    if isinstance(schema, list):
        return [with_real_dates(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: value if key in _VALUES else _parts(key, value) for key, value in schema.items()}
    also = told.get("allOf", [])
    if told.get("format") in ("date", "date-time") and isinstance(also, list):
        told["allOf"] = [*also, {"pattern": _BEGINNING}]
    return told


def _parts(key: str, value: Any) -> Any:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: with_real_dates(one) for name, one in value.items()}
    return with_real_dates(value)
