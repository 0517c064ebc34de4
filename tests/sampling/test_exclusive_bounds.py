"""A number that a schema bounds lies within its bounds, wherever in the schema they stand."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.sampling.bounds import beyond, with_exclusive_bounds

ENDS = st.one_of(
    st.integers(-3, 3), st.sampled_from([0.0, 0.5, -0.5, 0.9, -0.25, 1.5, -1.5, 1.25, 99, 99.5, 100, -100, 1 << 40])
)
KEYS = [("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"),
        ("exclusiveMinimum", "exclusiveMaximum")]  # fmt: skip
PLACES: list[tuple[Any, str]] = [  # of the schemas L and U, of the lower and the upper bound, and where a number stands
    ({"type": "object", "properties": {"minimum": "LU"}, "required": ["minimum"]}, '{"minimum":#}'),
    ({"type": "array", "items": "LU"}, "[#]"),
    ({"anyOf": [{"type": "null"}, "LU"]}, "#"),
    ({"allOf": ["L", "U"]}, "#"),
    ({"allOf": ["L", {"$ref": "#/$defs/most"}], "$defs": {"most": "U"}}, "#"),
]


def _filled(shape: Any, lower: dict[str, Any], upper: dict[str, Any]) -> Any:
    if isinstance(shape, dict):
        return {key: _filled(one, lower, upper) for key, one in shape.items()}
    if isinstance(shape, list):
        return [_filled(one, lower, upper) for one in shape]
    return {"L": {"type": "number"} | lower, "U": upper, "LU": {"type": "number"} | lower | upper}.get(shape, shape)


def _spellings(low: float, high: float) -> set[str]:
    """Numbers at, between and beside two bounds, each written in several ways."""
    span = high - low
    values = [low, high, low + span / 2, low + span / 7, low - 1, high + 1, low - span / 3, high + span / 3]
    values += [end + step for end in (low, high) for step in (-1e-9, -1e-12, 1e-12, 1e-9)]
    digits = {f"{value:.{places}f}" for value in values for places in (0, 1, 2, 9, 15)}
    return digits | {text.removeprefix("-") for text in digits} | {"-" + text.removeprefix("-") for text in digits}


@pytest.mark.parametrize(("place", "text"), PLACES)
@settings(max_examples=20, deadline=None)
@given(ends=st.tuples(ENDS, ENDS), keys=st.sampled_from(KEYS), data=st.data())
@example(ends=(0, 0.5), keys=KEYS[1], data=None)
@example(ends=(1, 1.5), keys=KEYS[3], data=None)
@example(ends=(-0.5, 0), keys=KEYS[2], data=None)
def test_what_is_taken_is_within(
    texts: Any, place: Any, text: str, ends: tuple[float, float], keys: tuple[str, str], data: st.DataObject | None
) -> None:
    low, high = min(ends), max(ends)
    if low == high:
        return
    schema = _filled(place, {keys[0]: low}, {keys[1]: high})
    closed = _filled(place, {"minimum": low}, {"maximum": high})
    valid = jsonschema.Draft202012Validator(schema)
    spelled = sorted(_spellings(low, high))
    chosen = spelled if data is None else data.draw(st.lists(st.sampled_from(spelled), min_size=8, max_size=8))
    for number in chosen:
        exact, written = Fraction(number), text.replace("#", number)
        inside = _inside(exact, Fraction(repr(low)), Fraction(repr(high)), keys)
        assert inside or not texts(schema, written), (schema, number)
        usual = "." not in number or number[-1] != "0"  # the parser takes few zeros at an end
        if inside and usual and _is_apart(exact, low, high) and texts(closed, written):
            assert texts(schema, written) and valid.is_valid(json.loads(written)), (schema, number)


def _inside(number: Fraction, low: Fraction, high: Fraction, keys: tuple[str, str]) -> bool:
    above = number >= low if keys[0] == "minimum" else number > low
    return above and (number <= high if keys[1] == "maximum" else number < high)


def _is_apart(number: Fraction, low: float, high: float) -> bool:
    """Whether a number is neither bound's next."""
    ends = [abs(Fraction(repr(end))) for end in (low, high)]
    return all(abs(number) == end or abs(abs(number) - end) >= Fraction(beyond(int(end))) - int(end) for end in ends)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0.1", "0"),
        ({"type": "number", "maximum": 0, "exclusiveMaximum": True, "minimum": -0.5}, "-0.1", "-0"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": False, "maximum": 0.5}, "0", "0.6"),
        ({"type": "number", "minimum": 0.25, "exclusiveMinimum": 0, "maximum": 0.5}, "0.25", "0.1"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": 0, "maximum": 0.5}, "0.1", "0"),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2.5}, "1", "0"),
        ({"type": "integer", "minimum": -2, "exclusiveMaximum": -1}, "-2", "-1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.75, "multipleOf": 0.25}, "0.25", "0"),
    ],
)
def test_bounds_in_other_ways(texts: Any, schema: dict[str, Any], inside: str, outside: str) -> None:
    assert texts(schema, inside) and not texts(schema, outside)


def test_other_bounds_stay_what_they_are() -> None:
    schema = {
        "enum": [{"exclusiveMinimum": 0}],
        "properties": {"exclusiveMinimum": {"exclusiveMinimum": 0.5, "exclusiveMaximum": 1}},
        "exclusiveMinimum": "wrong, and the parser's to refuse",
        "exclusiveMaximum": 1 << 60,
        "allOf": [{"exclusiveMinimum": 1 << 60}, {"exclusiveMinimum": True}, {"exclusiveMaximum": False, "maximum": 0}],
    }
    assert with_exclusive_bounds(schema) == schema
