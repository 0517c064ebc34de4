"""What a source of answers is, and an answer as it stands while it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import RequestError

from .conversation import ToolCall, without_reasoning

Wire = Mapping[str, Any]
_TEMPLATE = 200
Reading = Callable[[int, int], None]
"""Takes the number of a prompt's tokens that have been read, and that of all."""


@dataclass(frozen=True)
class Usage:
    """Tokens and times of one answer; None is not known. ``limit_reached``: it ended since the context is full."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    first_token_s: float | None = None
    tokens_a_second: float | None = None
    limit_reached: bool = False


@dataclass(frozen=True)
class Answer:
    """All that has come of an answer. ``text`` is what a conversation keeps, ``shown`` that without ``reasoning``, which
    is ``thinking`` as long as its end has not come. ``finish_reason`` None: there is more to come."""

    text: str = ""
    shown: str = ""
    reasoning: str = ""
    thinking: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    usage: Usage = Usage()


@dataclass(frozen=True)
class Ask:
    """What an answer is asked with. ``options`` are sampling settings by name; what is not there or ``None`` is as the
    source has it. ``form`` is a StructuredOutputs; ``tools`` are descriptions in OpenAI's form; ``variables`` go to the chat
    template."""

    messages: Sequence[Wire]
    options: Mapping[str, Any]
    form: Any = None
    tools: Sequence[Wire] = ()
    variables: Mapping[str, Any] | None = None

    @property
    def characters(self) -> int:
        """Of what is sent, from which its tokens are estimated: the JSON around the messages stands for what a template puts
        there, and some more for what it begins with."""
        return _TEMPLATE + len(json.dumps([*without_reasoning(self.messages), *self.tools], ensure_ascii=False))


class TooLongError(RequestError):
    """A server refuses what does not fit into its context."""


class Source(Protocol):
    """Who answers."""

    @property
    def name(self) -> str:
        """The model's, short."""

    @property
    def reference(self) -> str:
        """What opens it again."""

    @property
    def limit(self) -> int | None:
        """Tokens of context; None if that is not known."""

    @property
    def sampling(self) -> Mapping[str, Any] | None:
        """How its makers would have it sampled, by the names of the settings; None if that is not known, and it is done so
        where nothing else is asked for."""

    def hears(self, variable: str) -> bool:
        """Whether what is told under this name can reach the model, as far as that is known: whether its template reads it."""

    def count(self, ask: Ask) -> int | None:
        """Tokens of the prompt; None if that is not known before it is sent."""

    def answer(self, ask: Ask, reading: Reading) -> Generator[Answer, None, None]:
        """The answer as it comes, each time whole; before that ``reading`` is told how far the prompt has been read, where
        that is known. Closing the generator stops it. Raises EngineError."""

    def exact(self, ask: Ask) -> list[str]:
        """Exactly what would be sent, for a person to read."""

    def info(self) -> list[tuple[str, str]]:
        """What there is to know about it: names and values."""

    def close(self) -> None: ...
