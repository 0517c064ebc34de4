"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.formats.tokenizer import Tokenizer
from engine.runtime.outputs import CompletionOutput, RequestOutput

from .errors import ApiError, named
from .fields import MAX_LISTED, CompletionBody
from .generation import Generation, begin
from .keys import salt_of
from .logprobs import TextOffsets, text_logprobs
from .model import ServedModel
from .models import Models
from .prompts import encode
from .respond import Outputs, last_outputs, stream, usage, written
from .sse import Event, answered
from .tracing import current


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Texts or token ids, continued."""
        with_usage = body.with_usage
        model = await models.find(body.model)
        with named(body.names):
            work = await answered(request, prepare(model, body, request.state.caller))
        head = {
            "id": f"cmpl-{request.state.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        if body.stream:
            return stream(request, work.generation, partial(_events, work, head, with_usage))
        outputs = await last_outputs(request, work.generation)
        return await written(lambda: {**head, "choices": _choices(work, outputs), "usage": usage(outputs)})

    return router


@dataclass(frozen=True)
class Prompt:
    """``written``: given as a text, in which control tokens are written out; in that of ids they are not shown."""

    text: str
    ids: tuple[int, ...]
    written: bool

    def offsets(self, tokenizer: Tokenizer) -> TextOffsets:
        """Of its tokens; one that is put before the text has no place in it."""
        if not self.written:
            return TextOffsets(tokenizer, skip_special=True, continuation=False)
        before = len(tokenizer.decode(self.ids, skip_special=False)) - len(self.text + tokenizer.suffix_text)
        return TextOffsets(tokenizer, skip_special=False, continuation=False, at=-before)


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
        trace.asked({"role": "user", "content": prompt.text} for prompt in prompts)
    ids = [prompt.ids for prompt in prompts]
    priority = model.priority(body.priority)
    salt = salt_of(caller, body.cache_salt or "")
    shown = _none_made if only_echo else None
    generation = await begin(model, ids, params, caller, bool(body.stream), priority, salt, shown=shown)
    return Work(model, generation, prompts, params.n, echo, body.logprobs, bool(params.skip_special_tokens))


def _none_made(output: RequestOutput) -> RequestOutput:
    """Without the token that the engine made where none was asked for."""
    outputs = tuple(
        replace(c, text="", token_ids=(), logprobs=c.logprobs and (), finish_reason=c.finish_reason and "length")
        for c in output.outputs
    )
    return replace(output, outputs=outputs, num_discarded_tokens=0)


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    several: list[Any] = [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else prompt
    if len(several) > MAX_LISTED:
        raise ApiError(400, f"There are {len(several)} prompts; at most {MAX_LISTED} are taken.", "prompt")
    return several


async def _prompt(model: ServedModel, given: str | list[int], echo: bool) -> Prompt:
    if isinstance(given, str):
        return Prompt(given, await encode(model, given), written=True)
    ids = model.llm.engine.encode(tuple(given))
    return Prompt(model.llm.engine.tokenizer.decode(ids) if echo else "", ids, written=False)


def _choices(work: Work, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    return [
        choice
        for prompt, output in enumerate(outputs)
        for completion in output.outputs
        for choice in _Choice(work, prompt).advance(output, completion)
    ]


async def _events(work: Work, head: dict[str, Any], with_usage: bool, outputs: Outputs) -> AsyncGenerator[Event, None]:
    head = head | ({"usage": None} if with_usage else {})
    choices: dict[tuple[int, int], _Choice] = {}
    last: dict[int, RequestOutput] = {}
    async for prompt, output in outputs:
        last[prompt] = output
        for completion in output.outputs:
            if (choice := choices.get((prompt, completion.index))) is None:
                choice = choices[prompt, completion.index] = _Choice(work, prompt)
            for chunk in choice.advance(output, completion):
                yield {**head, "choices": [chunk]}
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
        echoed = self._work.prompts[self._prompt].text if begins else ""
        choice = {
            "index": self._prompt * self._work.n + completion.index,
            "text": echoed + new,
            "logprobs": self._logprobs(output, completion, begins),
            "finish_reason": completion.finish_reason,
        }
        return [choice]

    def _logprobs(self, output: RequestOutput, completion: CompletionOutput, begins: bool) -> dict[str, Any] | None:
        best = self._work.logprobs
        if best is None:
            return None
        tokens, logprobs = completion.since(self._scored)
        if logprobs is None:
            return None
        tokenizer = self._work.model.llm.engine.tokenizer
        self._scored = completion.num_tokens
        found: dict[str, list[Any]] = {}
        if begins:
            ids, skip = output.prompt_token_ids, self._work.skip_special
            known = output.prompt_logprobs or [None] * len(ids)
            prompt = self._work.prompts[self._prompt]
            found = text_logprobs(tokenizer, ids, known, best, prompt.offsets(tokenizer))
            self._offsets = TextOffsets(tokenizer, skip, continuation=True, at=len(prompt.text))
        new = text_logprobs(tokenizer, tokens, logprobs, best, self._offsets)
        return {name: [*found.get(name, ()), *values] for name, values in new.items()}
