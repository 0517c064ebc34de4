"""``AsyncLLM``: the same engine for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..backend.v1 import Array
from ..errors import EngineError, RequestError
from ..formats.pooling import Pooling
from ..formats.tokenizer import Tokenizer
from ..hub import located
from ..sampling import BeamSearchParams, SamplingParams
from .config import EngineConfig
from .conversations import Message, conversations, render
from .core import Health
from .engine import Engine, Params, check_kind
from .load import Progress, load
from .outputs import RequestOutput
from .pooling import PoolingParams, stacked
from .prepared import Latest, Post, Prepared
from .prompt import Prompt, listed, numbered, plain
from .request import Request

T = TypeVar("T")


class AsyncLLM:
    """A loaded model, by its path or its name on the hub; ``generate`` streams. Settings are those of ``EngineConfig``."""

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise RequestError(f"AsyncLLM is made of an engine, and not of {engine!r}; use await AsyncLLM.load(model).")
        self.engine = engine
        self._post: Post | None = None

    @classmethod
    async def load(cls, model: str | Path, *, progress: Progress | None = None, **settings: Any) -> AsyncLLM:
        """Load without blocking the event loop."""
        config = EngineConfig(model=Path(), **settings)  # refused before anything is downloaded
        config = replace(config, model=await asyncio.to_thread(located, model, progress))
        return cls(Engine(await asyncio.to_thread(load, config, progress)))

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend, over the defaults."""
        return self.engine.default_sampling_params

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """A request's outputs as they come, for a slow reader some left out, since each holds all before it; without
        ``stream`` the last alone, as ``best_of`` above ``n`` needs it. Cancelling, or leaving the iterator, aborts the
        request."""
        check_kind(sampling_params, SamplingParams)
        prepared = await self.prepare(prompt, sampling_params, request_id, priority, stream)
        async with aclosing(prepared.outputs()) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = True,
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        """``generate`` for a conversation, through the model's chat template."""
        check_kind(sampling_params, SamplingParams)
        if conversations(messages)[0] is not messages:
            raise RequestError("chat takes one conversation here; make a task for each of several.")
        text = await asyncio.to_thread(self.render, messages, **template)
        prepared = await self.prepare(text, sampling_params, request_id, priority, stream, add_special=False)
        async with aclosing(prepared.outputs()) as outputs:
            async for output in outputs:
                yield output

    def render(self, messages: Sequence[Message], **template: Any) -> str:
        """As ``LLM.render``."""
        return render(self.engine.loaded, messages, template)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, priority: int = 0
    ) -> RequestOutput:
        """The sequences that beam search finds, best first. Cancelling aborts the request."""
        check_kind(params, BeamSearchParams)
        return await (await self.prepare(prompt, params, request_id, priority, stream=False)).last()

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        priority: int = 0,
    ) -> Array:
        """As ``LLM.embed``. Cancelling aborts all that have not ended."""
        params = PoolingParams(pooling, normalize, dimensions)
        return await _of_all(listed(prompts), lambda prompt: self.prepare_embedding(prompt, params, priority))

    async def score(self, query: str, documents: str | Sequence[str], priority: int = 0) -> Array:
        """As ``LLM.score``. Cancelling aborts all that have not ended."""
        texts = [documents] if isinstance(documents, str) else documents
        return (await _of_all(texts, lambda text: self.prepare_ranking(query, text, priority))).reshape(-1)

    async def prepare_embedding(
        self,
        prompt: Prompt,
        params: PoolingParams,
        priority: int = 0,
        salt: bytes = b"",
        gate: asyncio.Semaphore | None = None,
    ) -> Prepared:
        """``prepare`` for an embedding. Raises RequestError or AdmissionError."""
        latest = self._latest()
        make = partial(self.engine.embedding, plain(prompt), params, latest.put, priority, salt)
        return Prepared(self.engine, await asyncio.to_thread(make), latest, gate)

    async def prepare_ranking(
        self, query: str, document: str, priority: int = 0, salt: bytes = b"", gate: asyncio.Semaphore | None = None
    ) -> Prepared:
        """``prepare`` for the score of a document, the one number of an embedding. Raises RequestError or AdmissionError."""
        latest = self._latest()
        make = partial(self.engine.ranking, query, document, latest.put, priority, salt)
        return Prepared(self.engine, await asyncio.to_thread(make), latest, gate)

    async def prepare(
        self,
        prompt: Prompt,
        params: Params,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = True,
        salt: bytes = b"",
        threads: Executor | None = None,
        gate: asyncio.Semaphore | None = None,
        add_special: bool = True,
    ) -> Prepared:
        """A request whose prompt is tokenized and whose parameters are checked, on one of ``threads``; ``outputs`` admits
        it. ``add_special`` as in ``Engine.encode``. Requests of different ``salt`` share no cached prefix. ``gate``: held
        while it is in the engine. Raises RequestError."""
        latest = self._latest()
        given = plain(prompt)

        def make() -> Request:
            text = given if isinstance(given, str) else None
            ids = self.engine.encode(given, add_special)
            return self.engine.request(text, ids, params, latest.put, request_id, priority, stream, salt)

        made = await asyncio.get_running_loop().run_in_executor(threads, make)
        return Prepared(self.engine, made, latest, gate)

    def _latest(self) -> Latest:
        loop = asyncio.get_running_loop()
        if self._post is None or self._post.loop is not loop:
            self._post = Post(loop)
        return Latest(self._post)

    async def abort(self, request_id: str) -> None:
        await asyncio.to_thread(self.engine.abort, request_id)

    def health(self) -> Health:
        return self.engine.health()

    async def close(self) -> None:
        """End all requests and free the device."""
        await asyncio.to_thread(self.engine.close)


async def _of_all(given: Sequence[T], prepare: Callable[[T], Awaitable[Prepared]]) -> Array:
    """The vectors of requests that are admitted once all are checked; an error says of which it is."""
    prepared: list[Prepared] = []
    for one in given:
        try:
            prepared.append(await prepare(one))
        except EngineError as error:
            raise numbered(error, len(prepared), len(given)) from error
    working = [asyncio.ensure_future(one.last()) for one in prepared]
    try:
        return stacked(await asyncio.gather(*working))
    finally:
        for each in working:
            each.cancel()
