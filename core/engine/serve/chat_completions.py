"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.answers import OPEN, Reader
from engine.runtime.outputs import CompletionOutput, RequestOutput
from engine.sampling import SamplingParams, StructuredOutputs

from .deltas import Delta, call_id
from .errors import ApiError
from .fields import ChatBody, NamedTool, Tool
from .model import Generation, ServedModel, salt_of
from .models import Models
from .respond import chat_logprobs, last_outputs, note, shown_tokens, usage
from .sse import Event, EventStream
from .tracing import current


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """An answer to a conversation."""
        with_usage = body.with_usage
        model = await models.find(body.model)
        chat = await prepare(model, body, request.state.caller)
        head = {"id": f"chatcmpl-{request.state.request_id}", "created": int(time.time()), "model": model.name}
        if body.stream:
            return EventStream(_events(chat, head, request, with_usage), chat.generation.close)
        output = (await last_outputs(request, chat.generation))[0]
        choices = [chat.choice(completion) for completion in output.outputs]
        return JSONResponse({**head, "object": "chat.completion", "choices": choices, "usage": usage([output])})

    return router


@dataclass(frozen=True)
class Chat:
    """A conversation whose answer is on its way."""

    model: ServedModel
    generation: Generation
    reader: Reader
    best: int

    def choice(self, completion: CompletionOutput) -> dict[str, Any]:
        """A whole choice."""
        parts = self.reader.read(completion.text, finished=True)
        calls = [
            {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parts.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": parts.content or (None if calls else "")}
        message |= {"reasoning_content": parts.reasoning} if parts.reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return {
            "index": completion.index,
            "message": message,
            "logprobs": chat_logprobs(self.model.llm.engine.tokenizer, completion, 0, self.best),
            "finish_reason": finish_reason(completion, bool(calls)),
        }


async def prepare(model: ServedModel, body: ChatBody, caller: str) -> Chat:
    """Renders, checks and takes a place; ApiError or EngineError where that cannot be done."""
    tools, forced, one_call = _tools(body)
    params = _params(body, model, forced)
    variables = template_variables(body, model)
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    salt = salt_of(caller, body.cache_salt or "")
    messages = body.templated()
    if trace := current.get():
        trace.asked(messages)
    text, ids = await model.chat_prompt(messages, described, variables, body.ending, salt)
    room = model.max_model_len - len(ids)
    if params.max_tokens is None and room < 1:
        raise ApiError(
            400,
            f"The conversation has {len(ids)} tokens; the context of {model.name} holds {model.max_model_len}.",
            "messages",
            "context_length_exceeded",
        )
    formed = (
        forced is None and params.structured_outputs is not None
    )  # such an answer is no call, whatever it looks like
    reader = Reader(
        frozenset(() if formed else (tool.function.name for tool in tools)),
        inside=text.rstrip().endswith(OPEN),
        plain=params.structured_outputs is not None,
        one_call=one_call,
    )
    generation = await model.begin([ids], params, caller, bool(body.stream), model.priority(body.priority), salt, text)
    return Chat(model, generation, reader, body.top_logprobs or 0)


def template_variables(body: ChatBody, model: ServedModel) -> dict[str, Any]:
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


def _params(body: ChatBody, model: ServedModel, forced: StructuredOutputs | None) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same; leave one out.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs; set it to true.", "top_logprobs")
    if forced is not None and body.form() is not None:
        raise ApiError(400, "A call of a tool is forced, and a form is asked for, too; leave one out.", "tool_choice")
    most = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    params = body.sampling(
        model.recommended,
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=forced,
    )
    if most is not None:
        return params
    return replace(params, max_tokens=None)  # up to the context's end


def _tools(body: ChatBody) -> tuple[list[Tool], StructuredOutputs | None, bool]:
    """The tools that the model is told of, the form of a call that it must make, and whether no second one may come."""
    tools, choice = body.tools or [], body.tool_choice
    if choice is not None and choice != "none" and not tools:
        raise ApiError(400, "tool_choice is given, and there are no tools.", "tool_choice")
    if choice == "none":
        return [], None, False
    one_call = body.parallel_tool_calls is False
    if not tools or choice in (None, "auto"):
        return tools, None, one_call
    wanted = tools
    if isinstance(choice, NamedTool):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
        if not wanted:
            raise ApiError(400, f"tool_choice names {choice.function.name}, and there is no such tool.", "tool_choice")
    return tools, StructuredOutputs(json={"anyOf": [_call_schema(tool, n) for n, tool in enumerate(wanted)]}), True


def _call_schema(tool: Tool, place: int) -> dict[str, Any]:
    """Of a call of the tool, at this place among others."""
    arguments = _moved(tool.function.parameters or {"type": "object"}, f"#/anyOf/{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema that has become a part of another, where its references begin at ``to``."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, to) for name, part in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def finish_reason(completion: CompletionOutput, calls: bool) -> str | None:
    return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason


async def _events(chat: Chat, head: dict[str, Any], request: Request, with_usage: bool) -> AsyncGenerator[Event, None]:
    head = {**head, "object": "chat.completion.chunk"}
    streams: dict[int, _Choice] = {}
    output: RequestOutput | None = None
    async with aclosing(chat.generation.outputs()) as outputs:
        async for _, output in outputs:
            for completion in output.outputs:
                stream = streams.setdefault(completion.index, _Choice(chat))
                for choice in stream.advance(completion):
                    yield {**head, "choices": [choice]}
    assert output is not None
    note(request, [output])
    if with_usage:
        yield {**head, "choices": [], "usage": usage([output])}
    yield "[DONE]"


class _Choice:
    """One choice of a stream."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._delta = Delta()
        self._begun = self._ended = False
        self._scored = 0

    def advance(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """What its chunks have as choices, none where nothing is new."""
        if self._ended:
            return []
        finished = completion.finish_reason is not None
        delta = self._delta.advance(self._chat.reader.read(completion.text, finished))
        found = []
        if not self._begun:
            self._begun = True
            found.append(self._wrapped(completion, {"role": "assistant", "content": ""}, None))
        if delta:
            found.append(self._wrapped(completion, delta, self._new_logprobs(completion)))
        if finished:
            self._ended = True
            last = self._wrapped(completion, {}, self._new_logprobs(completion))
            found.append(last | {"finish_reason": finish_reason(completion, bool(self._delta.sent.calls))})
        return found

    def _new_logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        start, self._scored = self._scored, shown_tokens(completion)
        if start == self._scored:
            return None
        return chat_logprobs(self._chat.model.llm.engine.tokenizer, completion, start, self._chat.best)

    def _wrapped(
        self, completion: CompletionOutput, delta: dict[str, Any], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": completion.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
