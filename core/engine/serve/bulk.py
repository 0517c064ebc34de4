"""What a JSON body is made of, seen before it is parsed: whoever parses too many parts holds up everybody else, and text that is
not Unicode could be in no answer."""

from __future__ import annotations

import re

import numpy as np

from .errors import ApiError

LISTS, FIELDS, VALUES = 1 << 17, 1 << 17, 1 << 19
"""Most lists and objects, fields of all objects, and values in all: parsed within a quarter of a second."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
"""Python's json takes them, though UTF-8 has none."""
_WORDS = {"lists and objects": ("[{", LISTS), "fields": (":", FIELDS), "values": (",[{", VALUES)}


def check_bulk(body: bytes) -> None:
    """ApiError 400 for a body of too many parts, in an encoding in which they cannot be counted, or with a lone surrogate. What
    is no JSON, as far as it is, has no more parts than are counted."""
    if b"\0" in body[:4] or body.startswith(_UTF16):
        raise ApiError(400, "The body is no JSON in UTF-8.")
    if _has_lone_surrogate(body):
        raise ApiError(
            400, "The body has a lone surrogate (\\ud800 to \\udfff without its partner), which no text has."
        )
    if all(_count(body, marks) <= most for marks, most in _WORDS.values()):
        return
    bare = _without_strings(body)
    for what, (marks, most) in _WORDS.items():
        if _count(bare, marks) > most:
            raise ApiError(400, f"The body has more than {most} {what}; send fewer at a time.")


def _has_lone_surrogate(body: bytes) -> bool:
    if _ENCODED_SURROGATE.search(body):
        return True
    if not _SURROGATE.search(body):
        return False
    escapes = body.replace(rb"\\", b"  ")  # a backslash that is left begins an escape
    return _SURROGATE.search(_PAIR.sub(b"", escapes)) is not None


def _count(body: bytes, marks: str) -> int:
    return sum(body.count(mark.encode()) for mark in marks)


def _without_strings(body: bytes) -> bytes:
    plain = body.replace(rb"\\", b"  ").replace(rb"\"", b"  ")  # a quote that is left begins or ends a string
    data = np.frombuffer(plain, np.uint8)
    inside = np.bitwise_xor.accumulate((data == ord('"')).view(np.uint8))
    return bytes(data[inside == 0])
