"""Lines for the person at the terminal, and texts of models made harmless to it."""

from __future__ import annotations

import sys
import unicodedata

_REORDERING = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def visible(text: str) -> str:
    """The text without what could move the cursor or reorder what is read: a model, a file or a tool wrote it, and a
    terminal obeys escape sequences."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _obeyed(c) else "\ufffd" for c in text)


def _obeyed(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in _REORDERING


def note(sentence: str) -> None:
    """A line for the person, on stderr."""
    print(f"engine: {visible(sentence)}", file=sys.stderr, flush=True)
