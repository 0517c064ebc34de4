"""An answer's text taken apart: reasoning, content and tool calls, each of which only ever grows."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from .calls import PartialCall, read_calls
from .reasoning import split_reasoning


@dataclass(frozen=True)
class Parts:
    """All that has come of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[PartialCall, ...] = ()


@dataclass(frozen=True)
class Reader:
    """How answers to a request are read. ``tools``: names of those that may be called; ``inside``: the prompt ended in an
    open block of reasoning; ``plain``: the answer has a form of its own, with no reasoning in it; ``one_call``: no more
    than one call is wanted."""

    tools: Set[str] = frozenset()
    inside: bool = False
    plain: bool = False
    one_call: bool = False

    def read(self, text: str, finished: bool) -> Parts:
        reasoning, rest, _ = ("", text, False) if self.plain else split_reasoning(text, self.inside, finished)
        if not self.tools:
            return Parts(reasoning, rest)
        content, calls = read_calls(rest, self.tools, finished)
        return Parts(reasoning, content, calls[:1] if self.one_call else calls)
