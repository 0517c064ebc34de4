"""How much a JSON body is made of. Whoever parses it holds up everybody else, so a body of too many parts is refused before."""

from __future__ import annotations

import numpy as np

from .errors import ApiError

LISTS, FIELDS, VALUES = 1 << 17, 1 << 17, 1 << 19
"""Most lists and objects, fields of all objects, and values in all: parsed within a quarter of a second."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_WORDS = {"lists and objects": ("[{", LISTS), "fields": (":", FIELDS), "values": (",[{", VALUES)}


def check_bulk(body: bytes) -> None:
    """ApiError 400 for a body of too many parts, or in an encoding in which they cannot be counted. What is no JSON, as far
    as it is, has no more parts than are counted."""
    if b"\0" in body[:4] or body.startswith(_UTF16):
        raise ApiError(400, "The body is no JSON in UTF-8.")
    if all(_count(body, marks) <= most for marks, most in _WORDS.values()):
        return
    bare = _without_strings(body)
    for what, (marks, most) in _WORDS.items():
        if _count(bare, marks) > most:
            raise ApiError(400, f"The body has more than {most} {what}; send fewer at a time.")


def _count(body: bytes, marks: str) -> int:
    return sum(body.count(mark.encode()) for mark in marks)


def _without_strings(body: bytes) -> bytes:
    plain = body.replace(rb"\\", b"  ").replace(rb"\"", b"  ")  # a quote that is left begins or ends a string
    data = np.frombuffer(plain, np.uint8)
    inside = np.bitwise_xor.accumulate((data == ord('"')).view(np.uint8))
    return bytes(data[inside == 0])
