"""Chat templates: Jinja in a sandbox, in the environment that the templates of Hugging Face are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import TemplateError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_SOURCE = 1 << 20  # characters
_MAX_OUTPUT = 1 << 24  # characters


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the texts of the model's sequence marks; tool_source replaces source if tools are given."""

    source: str
    bos_token: str | None = None
    eos_token: str | None = None
    tool_source: str | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, to be tokenized with parse_special and without add_special.

        variables: what else the template knows (enable_thinking, ...).  TemplateError if the template is invalid,
        refuses the messages, or gives more than 16 Mi characters.
        """
        template = _compile(self.tool_source if tools and self.tool_source else self.source)
        marks = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        known = {name: text for name, text in marks.items() if text is not None}
        values = {
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _bounded(template, known | values | variables)


def _bounded(template: Template, values: dict[str, Any]) -> str:
    parts = []
    room = _MAX_OUTPUT
    try:
        for part in template.generate(values):
            room -= len(part)
            if room < 0:
                raise TemplateError(f"the chat template gives more than {_MAX_OUTPUT} characters.")
            parts.append(part)
    except TemplateError:
        raise
    except Exception as error:  # a template can raise anything that Python can
        raise TemplateError(f"the chat template refuses these messages: {_sentence(error)}.") from error
    return "".join(parts)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateRuntimeError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for training; here its body is all there is to it."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses, besides what Jinja's sandbox refuses, products larger than any output may be."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and isinstance(right, int) and right > 64:
                raise TemplateRuntimeError("a power is too large")
            for items, times in ((left, right), (right, left)):
                repeats = isinstance(items, str | list | tuple) and isinstance(times, int)
                if repeats and len(items) * times > _MAX_OUTPUT:
                    raise TemplateRuntimeError("a repetition is too long")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateRuntimeError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own escapes HTML, which would change the prompt
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@cache
def _compile(source: str) -> Template:
    if len(source) > _MAX_SOURCE:
        raise TemplateError(f"the chat template has {len(source)} characters, where {_MAX_SOURCE} are the most.")
    try:
        return _environment().from_string(source)
    except Exception as error:  # Jinja raises its own errors, Python's compiler others
        raise TemplateError(f"the chat template is not valid: {_sentence(error)}.") from error
