"""A JSON schema as the parser understands it, which refuses some things that ask for nothing, or for more than it counts to."""

from __future__ import annotations

from typing import Any

from .subschemas import changed

FORMATS = frozenset(
    {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "unknown", "uri", "uuid"}
)
"""Of texts, which the parser holds them to."""
_MOST = 2**63 - 1024  # the greatest double within int64, in which it counts


def as_understood(schema: Any) -> Any:
    """The schema (JSON, as Python has it) without formats that the parser does not know, which are annotations, and without
    ``uniqueItems`` where it is false; bounds beyond int64 are drawn in to it, so that what fits fits the schema, too."""
    return changed(schema, _understood)


def _understood(schema: dict[str, Any]) -> dict[str, Any]:
    told = {key: _drawn_in(key, value) for key, value in schema.items()}
    if isinstance(told.get("format"), str) and told["format"] not in FORMATS:
        del told["format"]
    if told.get("uniqueItems") is False:
        del told["uniqueItems"]
    return told


def _drawn_in(key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if key in ("minimum", "exclusiveMinimum"):
        return max(value, -_MOST)
    return min(value, _MOST) if key in ("maximum", "exclusiveMaximum") else value
