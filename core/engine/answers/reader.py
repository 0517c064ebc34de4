"""An answer's text taken apart: reasoning, content and tool calls, each of which only ever grows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .calls import CallReader
from .harmony import HarmonyReading, Message
from .json_parts import PartialCall, Tools
from .reasoning import split_reasoning


@dataclass(frozen=True)
class Parts:
    """All that has come of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[PartialCall, ...] = ()
    messages: tuple[Message, ...] = ()
    """The same as it came, where that may be in any order."""


@dataclass(frozen=True)
class Reader:
    """How answers to a request are read. ``tools``: those that may be called; ``inside``: the prompt ended in an
    open block of reasoning; ``plain``: the answer has a form of its own, with no reasoning in it; ``one_call``: no more
    than one call is wanted; ``tag``: what does not begin with it is no call; ``harmony``: the text shows the
    marks of that format."""

    tools: Tools = field(default_factory=dict)
    inside: bool = False
    plain: bool = False
    one_call: bool = False
    tag: str = ""
    harmony: bool = False

    def read(self, text: str, finished: bool) -> Parts:
        """A text that is there at once."""
        return Reading(self).read(text, finished)

    def parts(self, reasoning: str, content: str, calls: tuple[PartialCall, ...]) -> Parts:
        return Parts(reasoning, content, calls[:1] if self.one_call else calls)


class Reading:
    """One answer, read again and again while it comes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._calls = CallReader(reader.tools)
        self._harmony = HarmonyReading(reader.tools) if reader.harmony else None

    def read(self, text: str, finished: bool) -> Parts:
        """``text`` is that of the time before, or more."""
        reader = self._reader
        if self._harmony is not None:
            parts = reader.parts(*self._harmony.read(text, finished))
            return replace(parts, messages=self._harmony.in_order(reader.one_call))
        reasoning, rest, _ = ("", text, False) if reader.plain else split_reasoning(text, reader.inside, finished)
        if not reader.tools:
            return Parts(reasoning, rest)
        if not rest.startswith(reader.tag):
            return Parts(reasoning, "" if reader.tag.startswith(rest) and not finished else rest)
        content, calls = self._calls.read(rest, finished)
        return reader.parts(reasoning, content, calls)
