"""Numbers out of a configuration, checked: from config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from ..errors import ModelError
from ..formats import Checkpoint

Kind = TypeVar("Kind")


def integer(source: Mapping[str, Any], key: str, default: int | None = None, low: int = 1, high: int = 1 << 24) -> int:
    """ModelError unless ``low`` to ``high``; an absent or null key is the default."""
    value = source.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(f"The configuration's {key} is {value!r}; it must be an integer from {low} to {high}.")
    return value


def positive(source: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """ModelError unless above 0 and finite; an absent or null key is the default."""
    value = source.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ModelError(f"The configuration's {key} is {value!r}; it must be a positive number.")
    return float(value)


def flag(source: Mapping[str, Any], key: str, default: bool) -> bool:
    """ModelError unless true or false; an absent or null key is the default."""
    return _of_kind(source, key, default, bool, "true or false")


def text(source: Mapping[str, Any], key: str, default: str) -> str:
    """ModelError unless a string; an absent or null key is the default."""
    return _of_kind(source, key, default, str, "a string")


def _of_kind(source: Mapping[str, Any], key: str, default: Kind, kind: type[Kind], words: str) -> Kind:
    value = source.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ModelError(f"The configuration's {key} is {value!r}; it must be {words}.")
    return value


def first_of_layers(checkpoint: Checkpoint, *keys: str) -> Mapping[str, Any]:
    """A GGUF's metadata with one number under each key where the file has one a layer: the first that is not 0."""
    data = dict(checkpoint.metadata)
    for key in (f"{checkpoint.architecture}.{key}" for key in keys):
        if isinstance(data.get(key), (list, np.ndarray)):
            data[key] = next((number for number in np.asarray(data[key]).tolist() if number), None)
    return data
