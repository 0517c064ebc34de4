"""``LLM``: offline generation in vLLM's manner."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ..backend.v1 import Array
from ..errors import RequestError
from ..formats.pooling import Pooling
from ..formats.tokenizer import Tokenizer
from ..hub import located
from ..sampling import BeamSearchParams, SamplingParams
from ..sampling.params import plain_number
from .config import EngineConfig
from .conversations import Message, conversations, render
from .engine import Engine, Params, check_kind
from .load import Loaded, Progress, load
from .outputs import RequestOutput
from .pooling import PoolingParams, stacked
from .prompt import Prompt, listed, of_each, plain
from .request import Request

_READING_S = 0.1  # between two looks at how far a prompt has been read
P = TypeVar("P", SamplingParams, BeamSearchParams)


class LLM:
    """A loaded model, by its path or its name on the hub (``owner/repo:TYPE``). Settings are those of ``EngineConfig``; use
    it in a ``with`` statement, or call ``close``."""

    def __init__(self, model: str | Path, *, progress: Progress | None = None, **settings: Any) -> None:
        config = EngineConfig(model=Path(), **settings)  # refused before anything is downloaded
        self.engine = Engine(load(replace(config, model=located(model, progress)), progress))

    @property
    def loaded(self) -> Loaded:
        return self.engine.loaded

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Those of requests that give none: what the model's makers recommend, over the defaults."""
        return self.engine.default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (a text, token ids, or a mapping of either); results in the order of the prompts.
        ``on_output`` sees every output as it comes."""
        given = listed(prompts)
        params = _params(sampling_params, self.default_sampling_params, len(given))
        encoded = of_each(self.engine.encode, given)
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._run(texts, encoded, params, on_output, priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt by beam search; each output's sequences come best first."""
        given = listed(prompts)
        encoded = of_each(self.engine.encode, given)
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._run(texts, encoded, _params(params, BeamSearchParams(), len(given)), None, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        texts = of_each(partial(self.render, **template), conversations(messages))
        encoded = of_each(partial(self.engine.encode, add_special=False), texts)
        return self._run(
            texts, encoded, _params(sampling_params, self.default_sampling_params, len(texts)), on_output, None
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> Array:
        """The embedding of each text (or token ids), f32 [prompts, hidden or ``dimensions``]: of the hidden states after the
        final norm the "last", the "mean", or the first ("cls"), of length 1 where ``normalize``. None: as the model's files
        say, else the last, normalized. ``dimensions``: only the first ones, as Matryoshka models allow. A text is never cut:
        AdmissionError where one is longer than the context; RequestError where it is empty, or another setting wrong."""
        params = PoolingParams(pooling, normalize, dimensions)
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        requests = of_each(lambda prompt: self.engine.embedding(prompt, params, outputs.put), listed(prompts))
        return stacked(self._finished(requests, outputs, None))

    def score(self, query: str, documents: str | Sequence[str]) -> Array:
        """How well each document answers a query, f32 [documents], by a model that was made for it: what its last layer says,
        through a sigmoid unless its files name another function. Nothing is cut: AdmissionError where a query and a document are
        longer than the context together; RequestError where the model has no such layer."""
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        texts = [documents] if isinstance(documents, str) else documents
        requests = of_each(lambda document: self.engine.ranking(query, document, outputs.put), texts)
        return stacked(self._finished(requests, outputs, None)).reshape(-1)

    def render(self, messages: Sequence[Message], **template: Any) -> str:
        """The prompt that the model's chat template makes of a conversation. RequestError for what it would not read."""
        return render(self.loaded, messages, template)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        reading: Callable[[int, int], None] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """One request's outputs as they come. Closing the iterator aborts the request. Until the first, ``reading`` is called
        now and then with the number of the prompt's tokens that have been read, and that of all."""
        given = plain(prompt)
        ids = self.engine.encode(given)
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        request = self.engine.request(given if isinstance(given, str) else None, ids, params, outputs.put)
        self.engine.admit(request)
        finished, waiting = False, None if reading is None else partial(_tell, reading, request)
        try:
            while not finished:
                output = self._next(outputs, waiting)
                waiting = None
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.engine.abort(request.request_id)

    def _run(
        self,
        texts: Sequence[str | None],
        encoded: Sequence[Sequence[int]],
        params: Sequence[Params],
        on_output: Callable[[RequestOutput], None] | None,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        ranks = _ranks(priority, len(texts))

        def request(text: str | None, ids: Sequence[int], param: Params, rank: int) -> Request:
            return self.engine.request(text, ids, param, outputs.put, None, rank, stream=on_output is not None)

        return self._finished(of_each(request, texts, encoded, params, ranks), outputs, on_output)

    def _finished(
        self,
        requests: Sequence[Request],
        outputs: queue.SimpleQueue[RequestOutput],
        on_output: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        """Admits requests whose outputs come by the queue, and gives the last one of each."""
        ids = [request.request_id for request in requests]
        finished: dict[str, RequestOutput] = {}
        try:
            self.engine.admit(*requests)
            while len(finished) < len(ids):
                output = self._next(outputs)
                if on_output is not None:
                    on_output(output)
                if output.finished:
                    finished[output.request_id] = output
        finally:
            if left := [request_id for request_id in ids if request_id not in finished]:
                self.engine.abort(*left)
        return [finished[request_id] for request_id in ids]

    def _next(
        self, outputs: queue.SimpleQueue[RequestOutput], waiting: Callable[[], None] | None = None
    ) -> RequestOutput:
        """The next output; until it is there ``waiting`` is called now and then."""
        while True:
            try:
                return outputs.get(timeout=1.0 if waiting is None else _READING_S)
            except queue.Empty:
                self.engine.check_progress()
                if waiting is not None:
                    waiting()

    def close(self) -> None:
        """End all requests and free the device."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tell(reading: Callable[[int, int], None], request: Request) -> None:
    reading(request.num_read, len(request.prompt_ids))


def _ranks(given: Sequence[int] | None, count: int) -> list[int]:
    """One priority a prompt."""
    if given is None:
        return [0] * count
    if not isinstance(given, Iterable):
        raise RequestError(f"priority is {given!r}; it must be a list of integers, one for each prompt.", "priority")
    ranks = list(map(plain_number, given))
    if len(ranks) != count:
        raise RequestError(f"There are {count} prompts but {len(ranks)} priorities; give one each.", "priority")
    return ranks


def _params(given: P | Sequence[P] | None, default: P, count: int) -> list[P]:
    """One set of parameters a prompt."""
    kind = type(default)
    if given is None or isinstance(given, kind):
        return [given or default] * count
    several = list(given) if isinstance(given, Sequence) else [given]
    for each in several:
        check_kind(each, kind)
    if len(several) != count:
        raise RequestError(
            f"Sampling parameters are given {len(several)} times for {count} prompts; give one for all, or one each."
        )
    return several
