"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.runtime.outputs import CompletionOutput, RequestOutput

from .errors import ApiError
from .fields import MAX_LISTED, CompletionBody
from .model import Generation, ServedModel, salt_of
from .models import Models
from .respond import TextOffsets, last_outputs, note, text_logprobs, usage
from .sse import Event, EventStream
from .tracing import current

Prompt = tuple[str, tuple[int, ...]]
"""A prompt as text and as ids."""


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Texts or token ids, continued."""
        with_usage = body.with_usage
        model = await models.find(body.model)
        work = await prepare(model, body, request.state.caller)
        head = {
            "id": f"cmpl-{request.state.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        if body.stream:
            return EventStream(_events(work, head, request, with_usage), work.generation.close)
        outputs = [work.asked(output) for output in await last_outputs(request, work.generation)]
        choices = [
            choice
            for prompt, output in enumerate(outputs)
            for completion in output.outputs
            for choice in _Choice(work, prompt).advance(output, completion)
        ]
        return JSONResponse({**head, "choices": choices, "usage": usage(outputs)})

    return router


@dataclass(frozen=True)
class Work:
    """Prompts whose continuations are on their way."""

    model: ServedModel
    generation: Generation
    prompts: Sequence[Prompt]
    n: int
    echo: bool
    logprobs: int | None
    skip_special: bool
    only_echo: bool

    def asked(self, output: RequestOutput) -> RequestOutput:
        """Without the token that the engine made where none was asked for."""
        if not self.only_echo:
            return output
        outputs = tuple(
            replace(c, text="", token_ids=(), logprobs=c.logprobs and (), finish_reason=c.finish_reason and "length")
            for c in output.outputs
        )
        return replace(output, outputs=outputs)


async def prepare(model: ServedModel, body: CompletionBody, caller: str) -> Work:
    """Tokenizes, checks and takes a place; ApiError or EngineError where that cannot be done."""
    echo = bool(body.echo)
    only_echo = echo and body.max_tokens == 0  # the engine makes one token at least, which is not given
    params = body.sampling(
        model.recommended,
        best_of=body.best_of,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if echo else None,
        max_tokens=1 if only_echo else body.max_tokens,
    )
    if body.stream and params.samples > params.n:
        raise ApiError(400, "best_of above n chooses at the end, and cannot be streamed.", "best_of")
    prompts = [await _prompt(model, given, echo) for given in _listed(body.prompt)]
    if trace := current.get():
        trace.asked({"role": "user", "content": text} for text, _ in prompts)
    ids = [prompt[1] for prompt in prompts]
    priority = model.priority(body.priority)
    salt = salt_of(caller, body.cache_salt or "")
    generation = await model.begin(ids, params, caller, bool(body.stream), priority, salt)
    return Work(model, generation, prompts, params.n, echo, body.logprobs, bool(params.skip_special_tokens), only_echo)


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    several: list[Any] = [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else prompt
    if len(several) > MAX_LISTED:
        raise ApiError(400, f"There are {len(several)} prompts; at most {MAX_LISTED} are taken.", "prompt")
    return several


async def _prompt(model: ServedModel, given: str | list[int], echo: bool) -> Prompt:
    if isinstance(given, str):
        return given, await model.encode(given)
    ids = model.llm.engine.encode(tuple(given))
    return model.llm.engine.tokenizer.decode(ids) if echo else "", ids


async def _events(work: Work, head: dict[str, Any], request: Request, with_usage: bool) -> AsyncGenerator[Event, None]:
    streams: dict[tuple[int, int], _Choice] = {}
    last: dict[int, RequestOutput] = {}
    async with aclosing(work.generation.outputs()) as outputs:
        async for prompt, made in outputs:
            output = last[prompt] = work.asked(made)
            for completion in output.outputs:
                stream = streams.setdefault((prompt, completion.index), _Choice(work, prompt))
                for choice in stream.advance(output, completion):
                    yield {**head, "choices": [choice]}
    note(request, last.values())
    if with_usage:
        yield {**head, "choices": [], "usage": usage(last.values())}
    yield "[DONE]"


class _Choice:
    """A continuation of one prompt: a whole one, or the parts of a stream."""

    def __init__(self, work: Work, prompt: int) -> None:
        self._work = work
        self._prompt = prompt
        self._text = ""
        self._begun = self._ended = False
        self._scored = 0
        tokenizer = work.model.llm.engine.tokenizer
        self._offsets = TextOffsets(tokenizer, work.skip_special, continuation=True)

    def advance(self, output: RequestOutput, completion: CompletionOutput) -> list[dict[str, Any]]:
        """What is new, none where nothing is."""
        if self._ended:
            return []
        self._ended = completion.finish_reason is not None
        new, self._text = completion.text[len(self._text) :], completion.text
        begins = self._work.echo and not self._begun
        if not (new or self._ended or begins):
            return []
        self._begun = True
        echoed = self._work.prompts[self._prompt][0] if begins else ""
        choice = {
            "index": self._prompt * self._work.n + completion.index,
            "text": echoed + new,
            "logprobs": self._logprobs(output, completion, begins),
            "finish_reason": completion.finish_reason,
        }
        return [choice]

    def _logprobs(self, output: RequestOutput, completion: CompletionOutput, begins: bool) -> dict[str, Any] | None:
        best = self._work.logprobs
        if best is None or completion.logprobs is None:
            return None
        tokenizer = self._work.model.llm.engine.tokenizer
        start, self._scored = self._scored, len(completion.token_ids)
        found: dict[str, list[Any]] = {}
        if begins:
            ids, skip = output.prompt_token_ids, self._work.skip_special
            known = output.prompt_logprobs or [None] * len(ids)
            found = text_logprobs(tokenizer, ids, known, best, TextOffsets(tokenizer, True, continuation=False))
            echoed = len(self._work.prompts[self._prompt][0])
            self._offsets = TextOffsets(tokenizer, skip, continuation=True, at=echoed)
        new = text_logprobs(tokenizer, completion.token_ids[start:], completion.logprobs[start:], best, self._offsets)
        return {name: [*found.get(name, ()), *values] for name, values in new.items()}
