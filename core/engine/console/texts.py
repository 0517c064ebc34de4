"""Texts from files and from stdin, as they are."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.errors import UsageError


def read_text_file(file: Path) -> str:
    """A file's text, as it is; UsageError if it cannot be read or is no UTF-8."""
    try:
        return decode_utf8(file.read_bytes(), str(file))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}.") from error


def read_stdin() -> str:
    """All of stdin, as it is; UsageError if it cannot be read or is no UTF-8."""
    try:
        return decode_utf8(sys.stdin.buffer.read(), "The input")
    except OSError as error:
        raise UsageError(f"The input cannot be read: {error.strerror or error}.") from error


def decode_utf8(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8: byte {error.start} is {data[error.start]:#04x}.") from error
