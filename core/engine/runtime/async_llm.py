"""``AsyncLLM``: the same engine for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ..formats.tokenizer import Tokenizer
from ..hub import located
from ..sampling import BeamSearchParams, SamplingParams
from .config import EngineConfig
from .core import Health
from .engine import Engine, Params
from .load import Progress, load
from .outputs import RequestOutput
from .prompt import Prompt, plain


class AsyncLLM:
    """A loaded model, by its path or its name on the hub; ``generate`` streams. Settings are those of ``EngineConfig``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    async def load(cls, model: str | Path, *, progress: Progress | None = None, **settings: Any) -> AsyncLLM:
        """Load without blocking the event loop."""
        path = await asyncio.to_thread(located, model, progress)
        config = EngineConfig(model=path, **settings)
        return cls(Engine(await asyncio.to_thread(load, config, progress)))

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """A request's outputs as they come; without ``stream`` the last alone, as ``best_of`` above ``n`` needs it.
        Cancelling, or leaving the iterator, aborts the request."""
        async with aclosing(self._outputs(prompt, sampling_params, request_id, priority, stream)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None, priority: int = 0
    ) -> RequestOutput:
        """The sequences that beam search finds, best first. Cancelling aborts the request."""
        async with aclosing(self._outputs(prompt, params, request_id, priority, stream=False)) as outputs:
            return await anext(outputs)

    async def _outputs(
        self, prompt: Prompt, params: Params, request_id: str | None, priority: int, stream: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

        def sink(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        given = plain(prompt)
        ids = await asyncio.to_thread(self.engine.encode, given)
        text = given if isinstance(given, str) else None
        submitted = await self._submit(text, ids, params, sink, request_id, priority, stream)
        finished = False
        try:
            while not finished:
                output = await self._next(outputs)
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.engine.abandon(submitted)

    async def _submit(self, *arguments: Any) -> str:
        """A cancelled caller leaves no request behind, though the submission itself cannot be stopped."""
        submission = asyncio.ensure_future(asyncio.to_thread(self.engine.submit, *arguments))
        try:
            return await asyncio.shield(submission)
        except asyncio.CancelledError:
            submission.add_done_callback(self._abandon)
            raise

    def _abandon(self, submission: asyncio.Future[str]) -> None:
        if not submission.cancelled() and submission.exception() is None:
            self.engine.abandon(submission.result())

    async def _next(self, outputs: asyncio.Queue[RequestOutput]) -> RequestOutput:
        while True:
            try:
                return await asyncio.wait_for(outputs.get(), timeout=1.0)
            except TimeoutError:
                self.engine.check_progress()

    async def abort(self, request_id: str) -> None:
        await asyncio.to_thread(self.engine.abort, request_id)

    def health(self) -> Health:
        return self.engine.health()

    async def close(self) -> None:
        """End all requests and free the device."""
        await asyncio.to_thread(self.engine.close)
