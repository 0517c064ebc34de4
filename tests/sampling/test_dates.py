"""Dates that a schema asks for are dates of the calendar, wherever in the schema they stand."""

from __future__ import annotations

import datetime
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.sampling.dates import with_real_dates

PLACES: list[tuple[dict[str, Any], Any]] = [  # of the schema D, and of its value d
    ("D", "d"),
    ({"properties": {"format": "D", "enum": "D"}, "required": ["format", "enum"]}, {"format": "d", "enum": "d"}),
    ({"type": "array", "items": "D"}, ["d"]),
    ({"type": "array", "prefixItems": [True, "D"]}, [0, "d"]),
    ({"anyOf": [{"type": "null"}, "D"]}, "d"),
    ({"$ref": "#/$defs/day", "$defs": {"day": "D"}}, "d"),
    ({"additionalProperties": "D", "type": "object"}, {"x": "d"}),
]
DAYS = st.tuples(
    st.one_of(st.integers(0, 9999), st.sampled_from([0, 4, 100, 400, 1900, 2000, 2023, 2024])),
    st.one_of(st.just(2), st.integers(1, 12)),
    st.one_of(st.integers(28, 31), st.integers(1, 31)),
)


def _filled(shape: Any, name: str, value: Any) -> Any:
    if isinstance(shape, dict):
        return {key: _filled(one, name, value) for key, one in shape.items()}
    if isinstance(shape, list):
        return [_filled(one, name, value) for one in shape]
    return value if shape == name else shape


@pytest.mark.parametrize(("schema", "value"), PLACES)
@settings(max_examples=40, deadline=None)
@given(day=DAYS, time=st.booleans(), known=st.booleans())
@example(day=(0, 1, 31), time=False, known=False)
@example(day=(0, 1, 31), time=True, known=False)
@example(day=(2023, 2, 29), time=False, known=True)
@example(day=(2023, 2, 29), time=True, known=True)
@example(day=(1900, 2, 29), time=True, known=False)
@example(day=(2000, 2, 29), time=True, known=False)
@example(day=(2023, 3, 1), time=False, known=True)
def test_a_day_is_taken_if_the_calendar_has_it(
    texts: Any, schema: Any, value: Any, day: tuple[int, int, int], time: bool, known: bool
) -> None:
    text = "{:04}-{:02}-{:02}".format(*day)
    try:
        datetime.date.fromisoformat(text)
        there = True
    except ValueError:
        there = False
    there = there and (day[0] % 2 == 0 or not known)
    wanted: dict[str, Any] = {"type": "string", "format": "date-time" if time else "date"}
    if known:
        wanted["allOf"] = [{"pattern": "^[0-9]{3}[02468]"}]
    asked, given_value = _filled(schema, "D", wanted), _filled(value, "d", text + "T10:20:30Z" * time)
    assert texts(asked, json.dumps(given_value, separators=(",", ":"))) == there
    if not time:
        checker = jsonschema.FormatChecker()
        assert jsonschema.Draft202012Validator(asked, format_checker=checker).is_valid(given_value) == there


def test_values_and_other_formats_stay_what_they_are() -> None:
    schema = {
        "const": {"format": "date"},
        "enum": [{"format": "date"}],
        "default": {"format": "date"},
        "examples": [{"format": "date"}],
        "properties": {"time": {"format": "time"}, "odd": {"format": ["date"]}},
        "allOf": "wrong, and the parser's to refuse",
        "format": "date",
    }
    assert with_real_dates(schema) == schema
