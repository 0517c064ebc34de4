"""Texts from files and from stdin, as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from engine.errors import UsageError

MAX_TEXT = 256 << 20
"""Bytes: beyond any context, and any text that is measured by; a device may give them without end."""
_AT_ONCE = 1 << 20


def read_text_file(file: Path, most: int = MAX_TEXT) -> str:
    """A file's text, as it is; UsageError if it cannot be read, has more than ``most`` bytes or is no UTF-8."""
    try:
        with file.open("rb") as opened:
            return read_text(opened, str(file), most)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}.") from error


def read_stdin() -> str:
    """All of stdin, as it is; UsageError if it cannot be read, is too large or is no UTF-8."""
    try:
        return read_text(sys.stdin.buffer, "The input")
    except OSError as error:
        raise UsageError(f"The input cannot be read: {error.strerror or error}.") from error


def read_text(opened: BinaryIO, what: str, most: int = MAX_TEXT) -> str:
    """All that follows, as it is; OSError if it cannot be read, UsageError as of ``read_text_file``."""
    data = bytearray()
    while part := opened.read(_AT_ONCE):
        data += part
        check_size(len(data), what, most)
    return decode_utf8(data, what)


def check_size(size: int, what: str, most: int = MAX_TEXT) -> None:
    if size > most:
        raise UsageError(f"{what} is larger than {most >> 20} MiB.")


def check_utf8(text: str, what: str) -> str:
    """A text from an argument, a variable or a terminal; UsageError for one in which there is what is no UTF-8."""
    return decode_utf8(text.encode("utf-8", "surrogateescape"), what)


def decode_utf8(data: bytes | bytearray, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8: byte {error.start} is {data[error.start]:#04x}.") from error
