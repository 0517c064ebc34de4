"""Exclusive bounds of a JSON schema. The parser lets a number through that equals its exclusive bound, where this is whole and
the other bound less than 1 away; schemas are told here the next number that is allowed."""

from __future__ import annotations

from typing import Any, TypeGuard

from .subschemas import changed

_FRACTIONS = 10**14  # whole numbers from here on leave no room for a fraction in
_DIGITS = 15  # of a number, such that the parser reads it exactly


def with_exclusive_bounds(schema: Any) -> Any:
    """The schema (JSON, as Python has it) with minimum and maximum in place of whole exclusive bounds. The other bound may come
    from a schema elsewhere, so it does not count."""
    return changed(schema, _bounded)


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    return _from("minimum", "exclusiveMinimum", _from("maximum", "exclusiveMaximum", schema, -1), 1)


def _from(inclusive: str, exclusive: str, schema: dict[str, Any], sign: int) -> dict[str, Any]:
    """``sign``: in which direction from the bound the numbers lie; towards 0 the parser has them right."""
    bound, other = schema.get(exclusive), schema.get(inclusive)
    if bound is True:  # as schemas of draft 4 write it
        bound, other = other, None
    if not _is_number(bound) or abs(bound) >= _FRACTIONS or sign * bound < 0 or bound != int(bound):
        return schema
    first: float = sign * beyond(abs(int(bound)))
    if _is_number(other) and sign * other > sign * first:
        first = other
    return {**{key: value for key, value in schema.items() if key != exclusive}, inclusive: first}


def beyond(bound: int) -> float:
    """The first number above a whole one that a schema without it admits."""
    if bound == 0:
        return 1e-20
    return bound + 10.0 ** (len(str(bound)) - _DIGITS)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
