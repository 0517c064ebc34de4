"""An answer as blocks that follow each other, reasoning, text and calls, as newer protocols stream it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.answers import Parts

from .deltas import call_id

Kind = Literal["reasoning", "text", "call"]
Step = Literal["start", "delta", "stop"]


@dataclass
class Block:
    """A part of an answer. ``text`` is all that has come of it, of a call its arguments."""

    index: int
    kind: Kind
    name: str
    id: str
    text: str = ""


def blocks(parts: Parts) -> list[Block]:
    """The blocks of a whole answer, one of text at least."""
    found = Blocks()
    list(found.advance(parts, finished=True))
    return found.blocks


class Blocks:
    """The blocks of an answer while it comes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False

    def advance(self, parts: Parts, finished: bool) -> Iterator[tuple[Step, Block, str]]:
        """What is new: blocks that begin, text that is added to them, and blocks that end."""
        for index, (kind, name, own, text) in enumerate(_wanted(parts, finished)):
            if index == len(self.blocks):
                yield from self._close()
                self.blocks.append(Block(index, kind, name, call_id(own, [block.id for block in self.blocks])))
                self._open = True
                yield "start", self.blocks[index], ""
            block = self.blocks[index]
            if new := text[len(block.text) :]:
                block.text = text
                yield "delta", block, new
        if finished:
            yield from self._close()

    def _close(self) -> Iterator[tuple[Step, Block, str]]:
        if self._open:
            self._open = False
            yield "stop", self.blocks[-1], ""


def _wanted(parts: Parts, finished: bool) -> list[tuple[Kind, str, str, str]]:
    """Kind, name, own id and text of each block."""
    kinds: dict[str, Kind] = {"reasoning": "reasoning", "content": "text", "call": "call"}
    found = [(kinds[message.kind], message.name, "", message.text) for message in parts.messages]
    if not found:
        texts: tuple[tuple[Kind, str], ...] = (("reasoning", parts.reasoning), ("text", parts.content))
        found = [(kind, "", "", text) for kind, text in texts if text]
        found += [("call", call.name, call.id, call.arguments) for call in parts.calls]
    if finished and all(kind == "reasoning" for kind, *_ in found):
        found.append(("text", "", "", ""))
    return found
