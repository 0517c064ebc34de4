"""JSON files from outside: bounded, and of the kind that is expected."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from engine.errors import FormatError
from engine.formats.mapping import read_errors, refuse_pointer

_MAX_FILE = 64 << 20  # bytes; the largest tokenizer.json and weight indexes have some 30 MB
_MAX_VALUES = 200_000  # a weight index of the largest models names 150,000 tensors; an empty list takes 64 bytes
VOCABULARY = 1_000_000  # values that a file of one line a token may have


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} is there twice")
        result[key] = value
    return result


def parse_object(text: bytes, what: str, unique: bool = False, max_values: int = _MAX_VALUES) -> dict[str, Any]:
    """A JSON object from UTF-8; FormatError naming `what` if it is anything else, may have more than `max_values` values
    within it, or with `unique` has a key twice."""
    value = _parse(text, what, unique, max_values)
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object.")
    return value


def _parse(text: bytes, what: str, unique: bool, max_values: int) -> Any:
    if text.count(b",") + text.count(b"[") + text.count(b"{") > max_values:
        raise FormatError(f"{what} has more than {max_values} values.")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not valid UTF-8.") from error
    except RecursionError as error:
        raise FormatError(f"{what} is nested too deep.") from error
    except ValueError as error:
        raise FormatError(f"{what} is not valid JSON: {error}.") from error


def read_bytes(path: Path) -> bytes:
    """The bytes of a file of at most 64 MiB."""
    with read_errors(path), path.open("rb") as file:
        data = file.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise FormatError(f"{path} is larger than {_MAX_FILE >> 20} MiB.")
    refuse_pointer(path, data)
    return data


def read_text(path: Path) -> str:
    """The text of a file of at most 64 MiB; FormatError if it is no UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not valid UTF-8.") from error


def read_object(path: Path, max_values: int = _MAX_VALUES) -> dict[str, Any]:
    """The JSON object that a file holds."""
    return parse_object(read_bytes(path), str(path), max_values=max_values)


def read_list(path: Path) -> list[Any]:
    """The JSON list that a file holds."""
    value = _parse(read_bytes(path), str(path), False, _MAX_VALUES)
    if not isinstance(value, list):
        raise FormatError(f"{path} must be a JSON list.")
    return value


def is_plain_name(name: object) -> TypeGuard[str]:
    """Whether a name that a file gives is one within its folder: it must not lead out of that."""
    return isinstance(name, str) and PurePosixPath(name).name == name and not {"\\", "\0", ":"} & set(name)
