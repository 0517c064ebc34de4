"""Dates of a JSON schema. The parser's formats "date" and "date-time" (RFC 3339) admit a 29th of February in any year, and a year
0, which calendars begin after; schemas are told here to admit neither."""

from __future__ import annotations

from typing import Any

from .subschemas import changed

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_BEGINNING = f"^(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"


def with_real_dates(schema: Any) -> Any:
    """The schema (JSON, as Python has it) with a pattern beside each format that is a date's."""
    return changed(schema, _dated)


def _dated(schema: dict[str, Any]) -> dict[str, Any]:
    also = schema.get("allOf", [])
    if schema.get("format") in ("date", "date-time") and isinstance(also, list):
        return {**schema, "allOf": [*also, {"pattern": _BEGINNING}]}
    return schema
