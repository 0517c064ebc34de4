"""A conversation and the answer to it, whatever the protocol: the prompt, the tools, what is sampled, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.answers import (
    FINAL,
    Parts,
    Reader,
    Reading,
    marks_are_special,
    open_mark,
    speaks_harmony,
    thoughts_are_special,
)
from engine.runtime.outputs import CompletionOutput
from engine.sampling import SamplingParams, StructuredOutputs

from .calling import tools_of, wanted
from .errors import ApiError, named
from .fields import ChatBody
from .generation import Generation, begin
from .keys import salt_of
from .model import ServedModel
from .prompts import chat_prompt, encode
from .tracing import current


@dataclass(frozen=True)
class Chat:
    """A conversation whose answer is on its way."""

    model: ServedModel
    generation: Generation
    reader: Reader
    best: int
    _readings: dict[int, Reading] = field(default_factory=dict)
    """Of each choice."""

    def parts(self, completion: CompletionOutput) -> Parts:
        """What has come, taken apart."""
        if (reading := self._readings.get(completion.index)) is None:
            reading = self._readings[completion.index] = Reading(self.reader)
        return reading.read(completion.text, completion.finish_reason is not None)


async def prepare(model: ServedModel, body: ChatBody, caller: str) -> Chat:
    """Renders, checks and takes a place; ApiError or EngineError where that cannot be done."""
    with named(body.names):
        return await _prepared(model, body, caller)


async def _prepared(model: ServedModel, body: ChatBody, caller: str) -> Chat:
    asked = wanted(body, model)
    params = _params(body, model.recommended, asked.form)
    plain, tokenizer = asked.form is not None and asked.plain, model.llm.engine.tokenizer
    harmony = speaks_harmony(tokenizer) and not plain and not asked.tag
    thinks = not plain and thoughts_are_special(tokenizer)
    if harmony or thinks or (asked.tools and marks_are_special(tokenizer)):
        params = replace(params, skip_special_tokens=False)
    alone = plain and not asked.tools and body.ending == "answer" and speaks_harmony(tokenizer)
    text, ids = await prompt(model, body, caller, FINAL if alone else "")
    _check_room(model, ids, params, "conversation")
    reader = Reader(
        asked.tools,
        inside=open_mark(text) != "",
        plain=plain,
        one_call=asked.one_call,
        tag=asked.tag,
        harmony=harmony,
    )
    salt = salt_of(caller, body.cache_salt or "")
    generation = await begin(model, [ids], params, caller, bool(body.stream), model.priority(body.priority), salt, text)
    return Chat(model, generation, reader, body.top_logprobs or 0)


async def prepare_raw(model: ServedModel, text: str, body: ChatBody, caller: str) -> Chat:
    """``prepare`` for a text that is given to the model as it is, in place of the conversation; its answer is not taken
    apart."""
    with named(body.names):
        params = _params(body, model.recommended, body.form())
        ids = await encode(model, text)
        _check_room(model, ids, params, "prompt")
        if trace := current.get():
            trace.asked([{"role": "user", "content": text}])
        salt = salt_of(caller, "")
        generation = await begin(model, [ids], params, caller, bool(body.stream), salt=salt)
    return Chat(model, generation, Reader({}, plain=True), 0)


def _check_room(model: ServedModel, ids: Sequence[int], params: SamplingParams, what: str) -> None:
    """ApiError 400 where an answer that has no length of its own has no place behind what is asked."""
    if params.max_tokens is None and len(ids) >= model.max_model_len:
        raise ApiError(
            400,
            f"The {what} has {len(ids)} tokens; the context of {model.name} holds {model.max_model_len}.",
            "messages",
            "context_length_exceeded",
        )


async def prompt(model: ServedModel, body: ChatBody, caller: str, head: str = "") -> tuple[str, tuple[int, ...]]:
    """The conversation as the model is given it, as text and as ids; ``head``: what the answer has begun with."""
    variables = _template_variables(body, model)
    described = [tool.model_dump(exclude_none=True) for tool in tools_of(body)]
    messages = body.templated()
    if trace := current.get():
        trace.asked(messages)
    salt = salt_of(caller, body.cache_salt or "")
    return await chat_prompt(model, messages, described, variables, body.ending, salt, head)


def _template_variables(body: ChatBody, model: ServedModel) -> dict[str, Any]:
    """What the template is told beside the conversation."""
    given, effort = body.chat_template_kwargs or {}, body.reasoning_effort
    if effort is None:
        return given
    name, value = ("enable_thinking", False) if effort == "none" else ("reasoning_effort", effort)
    if not model.template().reads(name):
        raise ApiError(
            400,
            f"The field reasoning_effort is {effort!r}, and the chat template of {model.name} has no {name}; leave it out.",
            "reasoning_effort",
        )
    if name in given:
        raise ApiError(
            400, f"reasoning_effort and chat_template_kwargs both set {name}; leave one out.", "reasoning_effort"
        )
    return {**given, name: value}


def _params(body: ChatBody, recommended: Mapping[str, float], form: StructuredOutputs | None) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        said = "max_completion_tokens is another name of max_tokens; leave one out."
        raise ApiError(400, said, "max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs; set it to true.", "top_logprobs")
    most = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    return body.sampling(
        {**recommended, "max_tokens": None},  # up to the context's end
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=form,
    )


def finish_reason(completion: CompletionOutput, calls: bool) -> str | None:
    return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
