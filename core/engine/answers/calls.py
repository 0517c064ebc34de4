"""Tool calls in an answer while it comes, in the forms that the field's models are trained to write.

Nothing that was given is taken back: so a stream adds up to the answer that is given whole. What has been read of an answer is
not read again when there is more of it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .gemma_calls import GEMMA, GemmaCall
from .json_parts import SPACE, CallObject, PartialCall, Tools
from .named_calls import LFM2, MISTRAL, PYTHON, NamedCall
from .section_calls import SECTIONS, SectionCall
from .tagged_calls import FUNCTION, MINIMAX, SEED, TaggedCall, tagged_call

if TYPE_CHECKING:
    from engine.formats.tokenizer import Tokenizer

TAG = "<tool_call>"  # Hermes, Qwen; their closing tags say nothing new
GRANITE = "<|tool_call|>"
LISTS = (
    "<tool_calls>",
    "<TOOLCALL>",
    "<|START_ACTION|>",
)  # of objects: Apriel's and the first MiniMax's, Nemotron's, Cohere's
MARKS = (TAG, MISTRAL, PYTHON, LFM2, GRANITE, *LISTS, FUNCTION, SEED, MINIMAX, GEMMA, *SECTIONS)
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_LONGEST = max(map(len, MARKS))
_Call = CallObject | NamedCall | TaggedCall | SectionCall | GemmaCall
_BEGIN = re.compile(r"\s*(?:\[[\s;,]*)?")


def marks_are_special(tokenizer: Tokenizer) -> bool:
    """Whether calls can be told only in a text that shows special tokens."""
    return any(tokenizer.token_id(mark) in tokenizer.control_ids for mark in MARKS)


def read_calls(text: str, known: Tools, finished: bool) -> tuple[str, tuple[PartialCall, ...]]:
    """The text that is certain to be content, and the calls of ``known`` tools that have begun. What cannot be told yet
    is in neither."""
    return CallReader(known).read(text, finished)


class CallReader:
    """Reads one answer, again and again while it comes. What stands between calls, and calls after the first that are none, are
    left out."""

    def __init__(self, known: Tools) -> None:
        self._known = known
        self._series: _Series | None = _Series("", 0, 0)  # some write no mark before them
        self._sought = 0
        """Where no mark has been looked for yet."""
        self._calls: list[PartialCall] = []
        self._content = 0
        """Where it ends, once there are calls."""

    def read(self, text: str, finished: bool) -> tuple[str, tuple[PartialCall, ...]]:
        """As ``read_calls``; ``text`` is that of the time before, or more."""
        found: tuple[PartialCall, ...] = ()
        while (series := self._begun(text)) is not None:
            found, goes_on = series.read(text, self._known)
            if found and not self._calls:
                self._content = series.place
            if goes_on and (found or not finished or series.start > 0):
                break
            self._calls += found
            self._series, self._sought, found = None, series.at, ()
        if self._calls or found:
            return text[: self._content].rstrip(), (*self._calls, *found)
        if finished:
            return text, ()
        if series is not None:
            return text[: series.place].rstrip(), ()
        held = max(n for mark in MARKS for n in range(len(mark)) if text.endswith(mark[:n]))
        return text[: len(text) - held].rstrip(), ()  # space before a call is no content

    def _begun(self, text: str) -> _Series | None:
        """The series that is being read, or that behind the next mark. None where that has not come."""
        if self._series is None:
            if mark := _MARK.search(text, self._sought):
                self._series = _Series(mark.group(), *mark.span())
            self._sought = max(self._sought, len(text) - _LONGEST + 1)
        return self._series


class _Series:
    """What may be calls, in a list or one after the other, from ``start`` on; its mark is at ``place``. When it has ended, that
    was at ``at``."""

    def __init__(self, mark: str, place: int, start: int) -> None:
        self.place, self.start, self.at = place, start, start
        self._mark = mark
        self._listed = False
        self._call: _Call | None = None
        self._calls: list[PartialCall] = []

    def read(self, text: str, known: Tools) -> tuple[tuple[PartialCall, ...], bool]:
        """The calls, and whether what follows may be another, or a part of the last."""
        while True:
            if self._call is None:
                begin = (SPACE if self._calls else _BEGIN).match(text, self.at)
                assert begin is not None  # it may be empty
                if begin.end() == len(text):
                    return tuple(self._calls), True
                self._call = self._begun(text, begin)
                if self._call is None:
                    return tuple(self._calls), False
            call, end = self._call.read(text, known)
            if end is None:
                return (*self._calls, *([call] if call else [])), True
            self.at = end
            if call is None:
                return tuple(self._calls), False
            self._calls.append(call)
            self._call = None

    def _begun(self, text: str, begin: re.Match[str]) -> _Call | None:
        """What may be a call behind ``begin``."""
        self._listed |= "[" in begin.group()
        if text.startswith("{", begin.end()):
            return CallObject(begin.end())
        if self._mark in (TAG, FUNCTION, SEED, MINIMAX):
            return tagged_call(self._mark, text, self.at, begin.end())
        if form := SECTIONS.get(self._mark):
            return SectionCall(self.at, begin.end(), form)
        if self._mark == GEMMA:
            return GemmaCall(self.at, begin.end())
        if self._mark == MISTRAL:
            return NamedCall(self.at, begin.end(), python=False)
        in_python = self._mark in (PYTHON, LFM2) or (self._listed and not self._mark)
        return NamedCall(self.at, begin.end(), python=True) if in_python else None
