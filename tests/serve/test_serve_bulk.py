"""Bodies of too many parts are known before they are parsed, and no others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.serve.bulk import FIELDS, LISTS, VALUES, check_bulk
from engine.serve.errors import ApiError


def refused(body: bytes) -> bool:
    try:
        check_bulk(body)
    except ApiError as error:
        assert error.status == 400 and error.message.endswith(".")
        return True
    return False


@pytest.mark.parametrize(
    ("item", "most"),
    [(b"[]", LISTS - 1), (b"{}", LISTS - 1), (b'{"":0}', min(LISTS - 1, FIELDS)), (b'""', VALUES), (b"null", VALUES)],
)
def test_the_most_of_each(item, most):
    """The list around them is one of the lists, and of the values, too."""
    assert not refused(b"[" + b",".join([item] * most) + b"]")
    assert refused(b"[" + b",".join([item] * (most + 1)) + b"]")


def test_what_strings_have_counts_for_nothing():
    """Marks, quotes and backslashes in strings, escaped in all ways, in front of few values or of too many."""
    rng = np.random.default_rng()
    for _ in range(4):
        letters = rng.choice(list('[]{}:,"\\\n\u2222\u005b'), rng.integers(1, 9))
        text = "".join(letters.repeat(rng.integers(1, 4, len(letters)))) * (2 * VALUES // len(letters))
        for ascii_only in (True, False):
            values = [text, "x" * int(rng.integers(3)), text[: rng.integers(5)]]
            assert not refused(json.dumps(values, ensure_ascii=ascii_only).encode())
            assert refused(json.dumps([*values, [0] * VALUES], ensure_ascii=ascii_only).encode())


def test_other_encodings_are_refused():
    body = json.dumps({"prompt": "\u2200" * 9, "x": [0] * 9}, ensure_ascii=False)
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        assert refused(body.encode(encoding))
    for encoding in ("utf-8", "utf-8-sig"):
        assert not refused(body.encode(encoding))
    assert not refused(b"")


def test_a_lone_surrogate_is_known_however_it_is_written():
    """Of pieces in a random order: a body is refused where Python's json finds what UTF-8 cannot hold."""
    rng = np.random.default_rng()
    pieces = [rb"\ud83d", rb"\uDE00", rb"\uD83D\ude00", rb"\\", rb"\"", b"x", b"ud800", rb"\u0041", "\ud7ff".encode()]
    pieces += ["\ud800".encode("utf-8", "surrogatepass"), "\U0001f600".encode()]
    seen = set()
    for _ in range(2000):
        body = b'{"a": "' + b"".join(pieces[at] for at in rng.integers(len(pieces), size=rng.integers(5))) + b'"}'
        try:
            json.loads(body)["a"].encode()
            lone = False
        except UnicodeEncodeError:
            lone = True
        assert refused(body) == lone, body
        seen.add(lone)
    assert seen == {True, False}
