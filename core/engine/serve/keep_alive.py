"""Ollama's ``keep_alive``: for how long a model stays loaded without a request."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

_PART = r"(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_PART})+)", re.ASCII)
_PARTS = re.compile(r"([\d.]+)([^\d.]+)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_S = 1e9
"""What is longer, some thirty years, is for ever."""


def _seconds(given: Any) -> Any:
    """As seconds; what is negative is for ever. What is neither a text nor a number is the schema's to refuse."""
    if isinstance(given, str):
        if not _DURATION.fullmatch(given):
            raise PydanticCustomError("duration", 'it should be a number of seconds, or a duration such as "5m"')
        total = sum(float(number) * _UNITS[unit] for number, unit in _PARTS.findall(given))
        given = -total if given.startswith("-") else total
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return given
    return float(given) if 0 <= given <= _MOST_S else math.inf


KeepAlive = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_seconds, json_schema_input_type=str | float)]
