"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.runtime.outputs import CompletionOutput

from .chat import Chat, finish_reason, prepare
from .deltas import Delta, call_id
from .fields import ChatBody
from .logprobs import chat_logprobs, shown_tokens
from .models import Models
from .respond import Outputs, last_outputs, stream, usage, written
from .sse import Event, answered


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """An answer to a conversation."""
        with_usage = body.with_usage
        model = await models.find(body.model)
        chat = await answered(request, prepare(model, body, request.state.caller))
        head = {"id": f"chatcmpl-{request.state.request_id}", "created": int(time.time()), "model": model.name}
        if body.stream:
            return stream(request, chat.generation, partial(_events, chat, head, with_usage))
        output = (await last_outputs(request, chat.generation))[0]

        def whole() -> dict[str, Any]:
            choices = [_whole(chat, completion) for completion in output.outputs]
            return {**head, "object": "chat.completion", "choices": choices, "usage": usage([output])}

        return await written(whole)

    return router


def _whole(chat: Chat, completion: CompletionOutput) -> dict[str, Any]:
    """A whole choice."""
    parts = chat.parts(completion)
    ids: list[str] = []
    for call in parts.calls:
        ids.append(call_id(call.id, ids))
    calls = [
        {"id": own, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for own, call in zip(ids, parts.calls, strict=True)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": parts.content or (None if calls else "")}
    message |= {"reasoning_content": parts.reasoning} if parts.reasoning else {}
    message |= {"tool_calls": calls} if calls else {}
    return {
        "index": completion.index,
        "message": message,
        "logprobs": chat_logprobs(chat.model.llm.engine.tokenizer, completion, 0, chat.best),
        "finish_reason": finish_reason(completion, bool(calls)),
    }


async def _events(chat: Chat, head: dict[str, Any], with_usage: bool, outputs: Outputs) -> AsyncGenerator[Event, None]:
    head = {**head, "object": "chat.completion.chunk"} | ({"usage": None} if with_usage else {})
    choices: dict[int, _Choice] = {}
    async for _, output in outputs:
        for completion in output.outputs:
            if (choice := choices.get(completion.index)) is None:
                choice = choices[completion.index] = _Choice(chat)
            for chunk in choice.advance(completion):
                yield {**head, "choices": [chunk]}
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
        delta = self._delta.advance(self._chat.parts(completion))
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
