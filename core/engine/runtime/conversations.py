"""Conversations as callers give them, and the prompts that a model's chat template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError
from .load import Loaded

Message = Mapping[str, Any]


def conversations(messages: Any) -> list[Sequence[Message]]:
    """The one conversation that is given, or each of several."""
    _check(messages)
    several = [messages] if isinstance(messages[0], Mapping) else list(messages)
    if not all(isinstance(each, Sequence) and not isinstance(each, str) for each in several):
        raise RequestError("A conversation is a list of messages; give one of these, or a list of several.")
    return several


def render(loaded: Loaded, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
    """What the model's chat template makes of a conversation, with the variables of ``template``. RequestError for what it would
    not read."""
    found = loaded.checkpoint.chat_template()
    if found is None:
        raise RequestError(f"{loaded.config.model} has no chat template; use generate with a prompt of your own.")
    for name, value in template.items():
        if value is not None and name != "add_generation_prompt" and not found.reads(name):
            raise RequestError(f"The chat template of {loaded.config.model} does not read {name}; leave it out.")
    _check(messages)
    return found.render([_message(each) for each in messages], **template)


def _check(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"A conversation is a list of messages, and not {messages!r}.")


def _message(given: Any) -> Message:
    """With its content as one text: OpenAI's may be a list of parts."""
    if not isinstance(given, Mapping):
        raise RequestError(f"A message is a mapping with a role and a content, and not {given!r}.")
    content = given.get("content")
    if content is None and not given.get("tool_calls"):
        raise RequestError(f"A message of the role {given.get('role')} has no content.")
    if not isinstance(content, list | tuple):
        return given
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise RequestError("The content of a message has parts that are no text; models see text alone.")
    return {**given, "content": "".join(map(str, parts))}
