"""Forms of answers in which calls stand behind a mark."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from engine.formats.tokenizer import Tokenizer
from engine.sampling import StructuredOutputs
from engine.sampling.grammar import json_in_lark

from .fields import Tool


class CallForms(ABC):
    """Forms of answers with calls of ``tools`` behind ``mark``. ``again``: what comes before the mark of a further call;
    None where one mark is before all."""

    def __init__(self, mark: str, again: str | None, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        self._begin, self._again, self._tokenizer, self._tools = mark, again, tokenizer, tools

    def alone(self) -> StructuredOutputs:
        return _grammar(f"start: {self._mark(self._begin)} rest", *self._rest(one_call=True))

    def or_text(self, form: StructuredOutputs, one_call: bool) -> StructuredOutputs:
        """Of calls, or of a text in its own: the first token decides."""
        more = "" if one_call or self._again is None else f" ({quoted(self._again)} call)*"
        call = f"call: {self._mark(self._begin)} rest"
        return _grammar(f"start: text | call{more}", f"text: {json_in_lark(form)}", call, *self._rest(one_call))

    def any(self) -> StructuredOutputs:
        """Of any text, with calls in it."""
        mark = self._mark(self._begin)
        begin = "begin" if mark.startswith("<") else "begin[lazy]"
        rest = self._rest(one_call=False)
        return _grammar("start: (begin rest)* TEXT", f"{begin}: TEXT {mark}", r"TEXT: /(.|\n)*/", *rest)

    def _mark(self, text: str) -> str:
        token = self._tokenizer.token_id(text)
        return f"<[{token}]>" if token in self._tokenizer.control_ids else quoted(text)

    @abstractmethod
    def _rest(self, one_call: bool) -> Iterator[str]:
        """Rules of what follows the mark; ``one_call``: of no more than one call."""


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _grammar(*rules: str) -> StructuredOutputs:
    return StructuredOutputs(grammar="\n".join(("%llguidance {}", *rules)))
