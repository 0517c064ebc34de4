"""Schemas that say what asks for nothing, or what the parser cannot count to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.sampling.understood import FORMATS

ANNOTATIONS = ("path", "binary", "password", "json-string", "base64url", "uri-reference", "idn-email", "regex", "byte")


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_a_format_that_is_not_known_asks_for_nothing(texts: Any, name: str) -> None:
    asked = {"type": "object", "properties": {"format": {"type": "string", "format": name}}, "required": ["format"]}
    assert texts(asked, '{"format":"any text"}') and not texts(asked, '{"format":5}')
    assert texts({"const": {"format": name}}, json.dumps({"format": name}, separators=(",", ":")))


@pytest.mark.parametrize("name", sorted(FORMATS - {"unknown"}))
def test_a_format_that_is_known_is_kept(texts: Any, name: str) -> None:
    assert not texts({"type": "string", "format": name}, '"@"')


def test_items_that_need_not_differ(texts: Any) -> None:
    assert texts({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1,1]")
    with pytest.raises(RequestError, match="uniqueItems"):
        texts({"type": "array", "uniqueItems": True}, "[]")


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("lower", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("upper", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("most", [2**63 - 1, 2**63, 2**64 - 1, 10**30, 10**400, 1e300])
def test_bounds_beyond_what_is_counted(texts: Any, kind: str, lower: str, upper: str, most: float) -> None:
    both = {"type": kind, lower: -most, upper: most}
    for given in (both, {"type": kind, lower: -most}, {"type": kind, upper: most}, {**both, lower: 0}):
        for value in (5, 10**18, -(10**18)):
            fits = value > given.get(lower, value - 1)
            assert texts(given, str(value)) == fits, (given, value)


def test_a_bound_that_nothing_reaches_is_refused(texts: Any) -> None:
    with pytest.raises(RequestError, match="range"):
        texts({"type": "integer", "minimum": 2**63}, "5")
