"""Forms of answers in harmony, gpt-oss's format, whose calls are messages to a tool, as the model is taught them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from engine.answers import speaks_harmony
from engine.formats.tokenizer import Tokenizer
from engine.sampling import StructuredOutputs
from engine.sampling.grammar import json_in_lark

from .fields import Tool

_NAME = re.compile(r"[\w.-]+")


def calls_in_harmony(tokenizer: Tokenizer, tools: Sequence[Tool]) -> bool:
    """Whether the model writes calls in it, and a header can tell these tools."""
    return speaks_harmony(tokenizer) and all(_NAME.fullmatch(tool.function.name) for tool in tools)


def call_alone(tools: Sequence[Tool]) -> StructuredOutputs:
    return _grammar("start: call", *_calls(tools))


def call_or(form: StructuredOutputs, tools: Sequence[Tool]) -> StructuredOutputs:
    """The form of a call, or of a text in its own."""
    final = f'final: <|channel|> "final" <|message|> form\nform: {json_in_lark(form)}'
    return _grammar("start: call | final", final, *_calls(tools))


def any_with_calls(tools: Sequence[Tool]) -> StructuredOutputs:
    """The form of any answer, in which calls are by the tools' schemas."""
    return _grammar(
        'start: (message <|end|> <|start|> "assistant")* (message | call)',
        "message: <|channel|> CHANNEL <|message|> TEXT",
        'CHANNEL: "analysis" | "commentary" | "final"',
        r"TEXT: /(.|\n)*/",
        *_calls(tools),
    )


def _calls(tools: Sequence[Tool]) -> list[str]:
    """What ``call`` may be."""
    found = [f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}"]
    for place, tool in enumerate(tools):
        header = json.dumps(f"commentary to=functions.{tool.function.name} ", ensure_ascii=False)
        arguments = StructuredOutputs(json={"type": "object", **(tool.function.parameters or {})})
        found.append(f'call_{place}: <|channel|> {header} <|constrain|> "json" <|message|> arguments_{place}')
        found.append(f"arguments_{place}: {json_in_lark(arguments)}")
    return found


def _grammar(*rules: str) -> StructuredOutputs:
    return StructuredOutputs(grammar="\n".join(("%llguidance {}", *rules)))
