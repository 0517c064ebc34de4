"""Prompts: what a conversation or a text is for a model, as text and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.answers import FINAL, REASONING, open_mark, speaks_harmony

from .errors import ApiError
from .fields import Ending
from .lanes import beside
from .model import ServedModel

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""What ``chat_template_kwargs`` may not set."""


def render(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    ending: Ending = "answer",
) -> str:
    """The prompt of a conversation. ApiError 400 where the template has no place for tools that are given, or nothing can
    be continued."""
    if ending == "continued":
        begun = _begun(messages)
        prompt = render(model, messages[:-1], tools, variables)
        # where the template opens reasoning, what is there comes after it
        if opened := open_mark(prompt):
            return f"{prompt.rstrip()}\n\n{REASONING[opened]}\n\n{begun}"
        return prompt + (FINAL if speaks_harmony(model.llm.engine.tokenizer) else "") + begun
    given = dict(variables or {})
    if wrong := next((name for name in RESERVED if name in given), None):
        raise ApiError(400, f"chat_template_kwargs may not set {wrong}.", "chat_template_kwargs")
    template = model.template()
    begin = ending == "answer"
    plain = template.render(messages, begin, **given)
    if not tools:
        return plain
    text = template.render(messages, begin, list(tools), **given)
    if text == plain:
        raise ApiError(400, f"The chat template of {model.name} has no tools; leave them out.", "tools")
    return text


async def chat_prompt(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    ending: Ending = "answer",
    salt: bytes = b"",
    head: str = "",
) -> tuple[str, tuple[int, ...]]:
    """The prompt of a conversation as text and as ids, in which answers that were given under ``salt`` have those that
    were generated. ``head``: what the answer has begun with."""
    turns = model.turns

    def make() -> tuple[str, tuple[int, ...]]:
        text = render(model, messages, tools, variables, ending) + head
        return text, turns.encode(text, salt)

    return await beside(make)


async def encode(model: ServedModel, text: str, add_special: bool = True) -> tuple[int, ...]:
    engine = model.llm.engine
    return await beside(lambda: engine.encode(text, add_special))


def _begun(messages: Sequence[Mapping[str, Any]]) -> str:
    """What there is of an answer that is to go on. ApiError 400 where that is no text, or nothing."""
    message = messages[-1] if messages else {"role": "nobody"}
    if message["role"] != "assistant" or message.get("tool_calls") or not message["content"].strip():
        raise ApiError(
            400,
            "The last message is to be continued, and it is no text of the assistant's; end with one."
            " Or end with a message to answer.",
            "messages",
        )
    return str(message["content"])
