"""Forms of answers whose calls are a head with the tool's name and an object in JSON, between marks, as the chat templates of
DeepSeek, Kimi K2 and Mistral show them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.formats.chat_template import ChatTemplate
from engine.formats.tokenizer import Tokenizer
from engine.sampling import StructuredOutputs
from engine.sampling.grammar import json_in_lark

from .call_forms import CallForms, quoted
from .fields import Tool
from .object_forms import call_object

Parts = tuple[str | re.Pattern[str], ...]
"""Marks and texts, in which {} is the tool's name, and what may stand between them."""


@dataclass(frozen=True)
class Section:
    """``mark`` and ``opening`` come before the calls and ``end`` after them. A call is ``head``, its arguments and ``tail``, or
    without a head an object with its name in it. ``between`` comes before a further call; None where it has a mark of its
    own."""

    mark: str
    head: Parts = ()
    tail: Parts = ()
    between: str | None = None
    opening: Parts = ()
    end: Parts = ()


_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", ("<｜tool▁calls▁end｜>",)
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIMI, _MISTRAL = "<|tool_calls_section_begin|>", "[TOOL_CALLS]"
_FENCED = Section(_CALLS, (_CALL, "function", _SEP, "{}\n```json\n"), ("\n```", _CALL_END), "\n", end=_CALLS_END)
_SECTIONS = (
    ((_CALLS, "```json"), _FENCED),
    ((_CALLS,), Section(_CALLS, (_CALL, "{}", _SEP), (_CALL_END,), "", end=_CALLS_END)),
    (
        (_KIMI,),
        Section(
            _KIMI,
            ("<|tool_call_begin|>", "functions.{}:", re.compile("0|[1-9][0-9]?[0-9]?"), "<|tool_call_argument_begin|>"),
            ("<|tool_call_end|>",),
            "",
            end=("<|tool_calls_section_end|>",),
        ),
    ),
    (
        (_MISTRAL, "[ARGS]", "[CALL_ID]"),
        Section(_MISTRAL, ("{}", "[CALL_ID]", re.compile("[a-zA-Z0-9]{9}"), "[ARGS]")),
    ),
    ((_MISTRAL, "[ARGS]"), Section(_MISTRAL, ("{}", "[ARGS]"))),
    ((_MISTRAL,), Section(_MISTRAL, between=", ", opening=(re.compile(r" ?\["),), end=("]",))),
)
"""By what of them a template shows; DeepSeek's V3 and R1, V3.1, Kimi K2's, and Mistral's of three times, the last first."""


def section_of(template: ChatTemplate) -> Section | None:
    """None where a template shows no such calls."""
    source = template.tool_source or template.source
    return next((section for shown, section in _SECTIONS if all(part in source for part in shown)), None)


class SectionForms(CallForms):
    def __init__(self, section: Section, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__(section.mark, "" if section.between is None else None, tokenizer, tools)
        self._section = section

    def _rest(self, one_call: bool) -> Iterator[str]:
        section = self._section
        more = "" if one_call or section.between is None else f"({quoted(section.between)} one)*"
        yield " ".join(["rest:", *self._parts(section.opening), "one", more, *self._parts(section.end)])
        if not section.head:
            yield f"one: {json_in_lark(call_object(self._tools))}"
            return
        yield f"one: {' | '.join(f'one_{place}' for place in range(len(self._tools)))}"
        for place, tool in enumerate(self._tools):
            head, tail = self._parts(section.head, tool.function.name), self._parts(section.tail)
            yield " ".join([f"one_{place}:", *head, f"arguments_{place}", *tail])
            arguments = StructuredOutputs(json={"type": "object", **(tool.function.parameters or {})})
            yield f"arguments_{place}: {json_in_lark(arguments)}"

    def _parts(self, parts: Parts, name: str = "") -> Iterator[str]:
        for part in parts:
            if isinstance(part, re.Pattern):
                yield f"/{part.pattern}/"
            else:
                yield quoted(part.replace("{}", name)) if "{}" in part else self._mark(part)
