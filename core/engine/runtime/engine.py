"""The three stages put together: tokenize in the caller's thread, compute in the step loop, detokenize beside it."""

from __future__ import annotations

import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import (
    AdmissionError,
    EngineStoppedError,
    FormatError,
    ModelError,
    RequestError,
    TemplateError,
    TokenizerError,
)
from ..formats.pooling import Embedding
from ..formats.ranking_files import pair_text
from ..formats.tokenizer import Tokenizer
from ..sampling import BeamSearchParams, SamplingParams, StructuredOutputs
from ..sampling.grammar import GrammarCompiler, Matcher
from ..sampling.processors import make_processors
from ..scheduler import SchedulerStats
from .core import EngineCore, Health
from .detokenize import continuation
from .load import Loaded
from .output_processor import OutputProcessor
from .pooling import Pooler, PoolingParams
from .request import Request, Sink
from .speculation import Speculation

Params = SamplingParams | BeamSearchParams


def check_kind(params: object, kind: type) -> None:
    """RequestError where parameters are of another kind."""
    if not isinstance(params, kind):
        raise RequestError(f"The parameters are of type {type(params).__name__}; here they must be {kind.__name__}.")


class Engine:
    """What ``LLM``, ``AsyncLLM`` and the server stand on. ``submit`` may be called from any thread."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        try:  # before any thread is there to be left behind
            loaded.checkpoint.tokenizer()
            self.has_tokenizer = True
        except TokenizerError:
            self.has_tokenizer = False  # token ids in, token ids out
        self._grammars: GrammarCompiler | None = None
        self._ids = 0
        self._mark = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._output_processor = OutputProcessor()
        self._core = EngineCore(loaded, self._output_processor.put)
        self._output_processor.start(self._core.finish)
        # threads keep what they use: an engine that nobody refers to any more would stay with its model for ever; and a
        # step that is computed while the interpreter ends would abort the process
        self._end = weakref.finalize(self, _end, self._core, self._output_processor, loaded)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; TokenizerError if the checkpoint has none."""
        return self.loaded.checkpoint.tokenizer()

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Those of requests that give none: what the model's makers recommend, over the defaults."""
        recommended: dict[str, Any] = {**self.loaded.checkpoint.sampling}
        return SamplingParams(**recommended)

    def encode(self, prompt: str | tuple[int, ...], add_special: bool = True) -> tuple[int, ...]:
        """Stage 1: a text, in which control tokens are read, with what the tokenizer puts around it unless a template has made
        all of it; or ids as they are. RequestError where the model has no such token."""
        ids, vocab = prompt, self.loaded.model.config.second_text or self.loaded.program.vocab
        if isinstance(ids, str):  # a tokenizer may have more tokens than the model has rows
            ids = tuple(self.tokenizer.encode(ids, add_special, parse_special=True))
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise _no_token(wrong, vocab, "prompt")
        return ids

    def submit(
        self,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: Params,
        sink: Sink,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = True,
    ) -> str:
        """Make a request and admit it. Raises RequestError or AdmissionError."""
        request = self.request(prompt, prompt_ids, params, sink, request_id, priority, stream)
        self.admit(request)
        return request.request_id

    def request(
        self,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: Params,
        sink: Sink,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = True,
        salt: bytes = b"",
        pooler: Pooler | None = None,
    ) -> Request:
        """A request, checked but not admitted; ``sink`` will get its outputs on stage 3's thread, each token's or,
        without ``stream``, the last alone. Requests of different ``salt`` share no cached prefix. Raises RequestError."""
        if not isinstance(params, BeamSearchParams):
            check_kind(params, SamplingParams)
        self._check_order(request_id, priority)
        beam = params if isinstance(params, BeamSearchParams) else None
        params = params if isinstance(params, SamplingParams) else params.sampling()
        ranked = beam is not None or params.samples > params.n
        if stream and ranked:
            raise RequestError(
                "best_of above n and beam search choose at the end, so their outputs cannot be streamed.", "best_of"
            )
        self._check(params, generates=pooler is None)
        with self._lock:
            self._ids += 1
            request_id = request_id or f"request-{self._ids}-{self._mark}"  # no caller's own
        tokenizer = self.tokenizer if self.has_tokenizer else None
        texts = [continuation(n, params, tokenizer, ranked) for n in range(params.samples)]
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids())
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        return Request(
            request_id,
            prompt,
            tuple(prompt_ids),
            params,
            seed,
            priority,
            sink,
            stream,
            texts,
            stops,
            matchers=self._matchers(params),
            beam=beam if beam is not None and beam.beam_width > 1 else None,
            ranked=ranked,
            processors=make_processors(params.logits_processors, self.loaded.program.vocab),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(prompt_ids),
            pooler=pooler,
            salt=salt,
        )

    def _check_order(self, request_id: str | None, priority: int) -> None:
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"The request id is {request_id!r}; it must be a text.")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 1 << 31:
            raise RequestError(f"priority is {priority!r}; it must be an integer of 32 bits.", "priority")
        if priority and self.loaded.config.policy != "priority":
            raise RequestError(
                "priority is for engines with policy='priority'; leave it out, or set the policy.", "priority"
            )

    def embedding(
        self,
        prompt: str | tuple[int, ...],
        params: PoolingParams,
        sink: Sink,
        priority: int = 0,
        salt: bytes = b"",
    ) -> Request:
        """A request for the embedding of a text or of token ids, checked but not admitted; ``sink`` gets its one output.
        Raises RequestError, or AdmissionError where the input is longer than the context: it is never cut."""
        ids = self.encode(prompt)
        if not prompt or not ids:
            raise RequestError("input is empty; give a text or token ids to embed.", "input")
        try:
            usual = self.loaded.checkpoint.embedding()
        except FormatError as error:
            raise RequestError(str(error)) from error
        return self._pooled(prompt, ids, params, usual, sink, priority, salt)

    def ranking(self, query: str, document: str, sink: Sink, priority: int = 0, salt: bytes = b"") -> Request:
        """As ``embedding``, for the score of a document for a query: the one number of the vector. Raises RequestError where the
        model has no head for it."""
        if not isinstance(query, str) or not isinstance(document, str):
            raise RequestError("A query and a document are texts, and one of them is none.", "documents")
        try:
            head, ids = self.loaded.model.ranking, self._pair(query, document)
        except (ModelError, FormatError, TemplateError) as error:
            raise RequestError(str(error)) from error
        return self._pooled(None, ids, PoolingParams(dimensions=1), head, sink, priority, salt)

    def _pair(self, query: str, document: str) -> tuple[int, ...]:
        """Both texts as one, by the files' template if they have one, else as their tokenizer puts two together."""
        files = self.loaded.checkpoint.ranking()
        if files.template is not None:
            texts = {"{query}": query, "{document}": document}
            text = re.sub(r"\{query\}|\{document\}", lambda found: texts[found[0]], files.template)
            return self.encode(text, add_special=False)
        if files.by_messages:
            made = pair_text(files, self.loaded.checkpoint.chat_template(), query, document)
            return self.encode(made, add_special=False)
        query = files.prompt + query
        first, second = (self.encode(tuple(ids)) for ids in self.tokenizer.encode_pair(query, document))
        shift = self.loaded.model.config.second_text
        return (*first, *(token + shift for token in second))

    def _pooled(
        self,
        prompt: str | tuple[int, ...] | None,
        ids: tuple[int, ...],
        params: PoolingParams,
        usual: Embedding,
        sink: Sink,
        priority: int,
        salt: bytes,
    ) -> Request:
        room = self.loaded.max_model_len
        if len(ids) > room:
            raise AdmissionError(f"The input has {len(ids)} tokens, and the context holds {room}; shorten it.")
        pooler = params.pooler(usual, self.loaded.program.hidden, self.loaded.model.config.causal)
        text = prompt if isinstance(prompt, str) else None
        return self.request(text, ids, SamplingParams(), sink, None, priority, False, salt, pooler)

    def _matchers(self, params: SamplingParams) -> list[Matcher]:
        """A grammar's state for each sample; RequestError says what is wrong with the grammar."""
        if params.structured_outputs is None:
            return []
        compiler, form = self._compiler(), params.structured_outputs
        with _field_of(form):
            return compiler.matchers(form, params.samples, params.ignore_eos)

    def knows_form(self, form: StructuredOutputs) -> bool:
        """Whether requests with this form are made, or refused, without its being compiled first."""
        return self._grammars is not None and self._grammars.knows(form)

    def compile_form(self, form: StructuredOutputs) -> None:
        """Makes a form known, in up to seconds of this thread. RequestError says what is wrong with it."""
        compiler = self._compiler()
        with _field_of(form):
            compiler.compile(form)

    def _compiler(self) -> GrammarCompiler:
        if not self.has_tokenizer:
            raise RequestError(
                "structured_outputs needs a tokenizer, and this checkpoint has none.", "structured_outputs"
            )
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.loaded.program.vocab, self.eos_ids())
        return self._grammars

    def admit(self, *requests: Request) -> None:
        """Hand requests to the step loop together, so that one step can take them all; AdmissionError when one can
        never fit, and then none of them is admitted."""
        for request in requests:
            request.admitted = time.monotonic()
        self._core.add(*requests)

    def admit_soon(self, request: Request, done: Callable[[BaseException | None], None]) -> None:
        """``admit`` for callers that must not wait; ``done`` gets what it would raise, or None, on the loop's thread. If
        the loop has ended nobody calls it: ``check_progress`` tells."""
        request.admitted = time.monotonic()
        self._core.add_soon(request, done)

    def eos_ids(self) -> frozenset[int]:
        """The ids that end a generation, of the files and of the tokenizer, without those that the model does not have."""
        known = self.tokenizer.eos_ids if self.has_tokenizer else frozenset[int]()
        vocab = self.loaded.program.vocab
        return frozenset(token for token in self.loaded.checkpoint.eos_ids | known if 0 <= token < vocab)

    def _check(self, params: SamplingParams, generates: bool) -> None:
        """RequestError where this model cannot do what is asked for."""
        if generates and not self.loaded.model.generates:
            what = "has no head (lm_head)" if self.loaded.model.config.causal else "is an encoder"
            raise RequestError(f"This checkpoint {what}; it can embed texts, and not generate any.")
        if params.stop and not self.has_tokenizer:
            raise RequestError(
                "Stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids.", "stop"
            )
        vocab = self.loaded.program.vocab
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < vocab:
                    raise _no_token(token, vocab, name)

    def abort(self, *request_ids: str) -> None:
        """Ends these requests together, in any state, unless they or the engine have ended already."""
        with suppress(EngineStoppedError):
            self._core.abort(*request_ids)

    def abandon(self, request: Request) -> None:
        """``abort`` of this request, and of no other with its id, without waiting for it to be done."""
        self._core.abandon(request)

    def scheduler_stats(self) -> SchedulerStats:
        """Waiting, running and preempted sequences, and the block pools, as of now."""
        return self._core.scheduler.stats()

    def health(self) -> Health:
        return self._core.health()

    def speculation(self) -> Speculation:
        """How many tokens have been guessed, and how many of them held."""
        return self._core.speculation

    def check_progress(self) -> None:
        """EngineStoppedError when nothing has moved for as long as the watchdog allows."""
        self._core.check_progress()

    def close(self) -> None:
        """End all requests and free the device."""
        self._end()


@contextmanager
def _field_of(form: StructuredOutputs) -> Iterator[None]:
    """What is wrong with a form is so with the field that has it."""
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error), form.field) from error


def _no_token(token: int, vocab: int, field: str) -> RequestError:
    return RequestError(f"The token id {token} does not exist; this model's ids go from 0 to {vocab - 1}.", field)


def _end(core: EngineCore, output_processor: OutputProcessor, loaded: Loaded) -> None:
    core.close()
    output_processor.close()
    loaded.close()


__all__ = ["Engine", "Params"]
