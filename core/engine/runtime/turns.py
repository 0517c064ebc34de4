"""The ids that were generated for the answers of conversations, so that the next turn's prompt has them again.

Tokenizing an answer's text may give other ids than the model chose. Then the prefix cache has nothing of what comes after
the first that differs, and the model reads a context that it has not written.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..formats.tokenizer import Tokenizer

_TOKENS = 1 << 20  # remembered in all
_ALIKE = 16  # answers to one prompt that are remembered
_ENDS, _END = 64, 6  # how many ends of prompts are known, and their characters: what a template writes before an answer
_LATE = 16  # tokens at an answer's end that its text may be without: a stop string, the end of a turn, half a character
_PART = 16  # tokens, a block of the cache, from which on a part of an answer is worth other ids than tokenizing gives
_DIGEST = 16  # bytes


@dataclass(frozen=True)
class _Answer:
    """``length`` characters that ``ids`` stand for, and their digest."""

    length: int
    digest: bytes
    ids: tuple[int, ...]


class Turns:
    """Answers by the prompts before them, of which only digests are kept; the ones used longest ago make room. Safe to
    share between threads."""

    def __init__(self, tokenizer: Tokenizer, most: int = _TOKENS) -> None:
        self._tokenizer = tokenizer
        self._most = most
        marks = map(tokenizer.token_text, tokenizer.literal_ids)
        self._marks = frozenset(mark for mark in marks if mark and not mark.isspace())
        self._answers: OrderedDict[bytes, list[_Answer]] = OrderedDict()
        self._ends: OrderedDict[str, None] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def remember(self, prompt: str, answer: str, ids: Sequence[int], scope: bytes = b"") -> None:
        """``ids`` were generated for ``answer`` after ``prompt``. What they say beyond the answer is left out; nothing is
        remembered where they say something else. ``scope``, at most 64 bytes: whose conversation it is; others never get it."""
        said, text = self._said(answer, ids)
        if not said or not prompt:
            return
        key = blake2b(_encoded(prompt), key=scope, digest_size=_DIGEST).digest()
        new = _Answer(len(text), _digest(text), said)
        with self._lock:
            known = self._answers.get(key, [])
            kept = [one for one in known if one.digest != new.digest][1 - _ALIKE :]
            self._answers[key] = [*kept, new]
            self._answers.move_to_end(key)
            self._held += _tokens(self._answers[key]) - _tokens(known)
            while self._held > self._most:
                _, oldest = self._answers.popitem(last=False)
                self._held -= _tokens(oldest)
            self._ends[prompt[-_END:]] = None
            self._ends.move_to_end(prompt[-_END:])
            if len(self._ends) > _ENDS:
                self._ends.popitem(last=False)

    def encode(self, prompt: str, scope: bytes = b"") -> tuple[int, ...]:
        """The ids of a rendered prompt, in which answers that are remembered, or what is left of one that was cut, stand where
        they stood. They say what tokenizing the whole prompt says, which is done where none is found."""
        joined: list[int] = []
        at = 0
        for place, length, ids in self._found(prompt, scope):
            joined += self._plain(prompt[at:place])
            joined += ids
            at = place + length
        if at:
            joined += self._plain(prompt[at:])
            if self._text(joined) == prompt:
                return tuple(joined)
        plain = self._plain(prompt)
        # a tokenizer may add spaces of its own to a prompt, which is no reason to have other ids
        return tuple(joined if at and self._text(joined) == self._text(plain) else plain)

    def _found(self, prompt: str, scope: bytes) -> list[tuple[int, int, tuple[int, ...]]]:
        """Answers in the prompt, one after the other: where they begin, their characters and their ids."""
        found: list[tuple[int, int, tuple[int, ...]]] = []
        digest = blake2b(key=scope, digest_size=_DIGEST)
        hashed = free = 0
        for place in self._places(prompt):
            digest.update(_encoded(prompt[hashed:place]))
            hashed = place
            if place < free:
                continue
            key = digest.digest()
            with self._lock:
                known = list(self._answers.get(key, ()))
            length, ids = self._longest(known, prompt, place)
            if not ids:
                continue
            found.append((place, length, ids))
            free = place + length
            with self._lock:
                if key in self._answers:
                    self._answers.move_to_end(key)
        return found

    def _longest(self, known: Sequence[_Answer], prompt: str, place: int) -> tuple[int, tuple[int, ...]]:
        """The longest answer that the prompt has there, or else the longest part of one: characters and ids."""
        for one in sorted(known, key=lambda one: -one.length):
            end = place + one.length
            if _digest(prompt[place:end]) == one.digest and not self._cuts_mark(prompt, end):
                return one.length, one.ids
        parts = (self._part(one, prompt, place) for one in known)
        return max(parts, key=lambda part: part[0], default=(0, ()))

    def _part(self, one: _Answer, prompt: str, place: int) -> tuple[int, tuple[int, ...]]:
        """The ids with which the text there, and the answer, begins, if they are worth it: whoever asked left before the
        answer's end, or has changed it."""
        data, at = _encoded(prompt[place : place + one.length]), 0
        whole: list[tuple[int, int]] = []  # bytes and ids, where a character ends
        for number, token in enumerate(one.ids, 1):
            said = self._tokenizer.token_bytes(token, skip_special=False)
            if data[at : at + len(said)] != said:
                break
            at += len(said)
            if number >= _PART and (at == len(data) or data[at] >> 6 != 0b10):  # a whole character
                whole.append((at, number))
        for end, count in reversed(whole):
            length = len(data[:end].decode("utf-8", "surrogatepass"))
            if not self._cuts_mark(prompt, place + length):
                return length, one.ids[:count]
        return 0, ()

    def _cuts_mark(self, prompt: str, at: int) -> bool:
        """Whether ``at`` lies within a token that stands for itself: an answer that goes on with ``<`` has nothing of the
        ``<|im_end|>`` behind its part."""
        return any(prompt.find(mark, max(0, at - len(mark) + 1), at + len(mark) - 1) >= 0 for mark in self._marks)

    def _places(self, prompt: str) -> Iterator[int]:
        """Where a prompt ends as one that was answered has ended."""
        with self._lock:
            ends = "|".join(map(re.escape, self._ends))
        return (match.end(1) for match in re.finditer(f"(?=({ends}))", prompt) if ends)

    def _said(self, answer: str, ids: Sequence[int]) -> tuple[tuple[int, ...], str]:
        """The ids up to the last that the answer has whole, and what they say of it."""
        data = _encoded(answer)
        parts = [self._tokenizer.token_bytes(token, skip_special=False) for token in ids]
        for count in range(len(parts), max(len(parts) - _LATE, 1) - 1, -1):
            said = b"".join(parts[:count])
            if data.startswith(said) and (text := said.decode("utf-8", "ignore")).encode() == said:
                return tuple(ids[:count]), text
        return (), ""

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(text: str) -> bytes:
    return blake2b(_encoded(text), digest_size=_DIGEST).digest()


def _tokens(answers: Sequence[_Answer]) -> int:
    return sum(len(answer.ids) for answer in answers)
