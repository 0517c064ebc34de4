"""A model that is served: loaded when it is asked for, and unloaded when its memory is wanted."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack

from engine.errors import EngineError
from engine.formats.chat_template import ChatTemplate
from engine.runtime.async_llm import AsyncLLM
from engine.runtime.engine import Engine
from engine.runtime.turns import Turns

from .admission import Admission
from .errors import ApiError, without_folders
from .fields import ContextOption
from .log import log
from .metrics import Metrics


class ServedModel:
    """A model by the name that requests have for it; ``opener`` loads it when it is first asked for, and may put on the
    stack what is to be closed with it. After ``keep_s`` without a request it is unloaded, unless a request says otherwise."""

    def __init__(
        self,
        name: str,
        opener: Callable[[ExitStack], Engine],
        admission: Admission,
        metrics: Metrics,
        deadline_s: float | None = None,
        keep_s: float = math.inf,
    ) -> None:
        self.name = name
        self._open = opener
        self._llm: AsyncLLM | None = None
        self._turns: Turns | None = None
        self._opened = ExitStack()
        self._past: Counter[str] = Counter()
        self._loading = asyncio.Lock()
        self.users = 0
        """Requests that have found the model and not ended."""
        self.used_at = time.monotonic()
        self._usual_keep_s = self.keep_s = keep_s
        self.bytes = 0
        """Of weights and KV cache, while the model is loaded or as it was last."""
        self.admission = admission
        self.forms = admission.of_forms()
        self.figures = metrics.of(name)
        self.created = int(time.time())
        self.deadline_s = deadline_s

    @property
    def loaded(self) -> bool:
        return self._llm is not None

    @property
    def llm(self) -> AsyncLLM:
        """Of a model that is loaded."""
        assert self._llm is not None
        return self._llm

    def load(self) -> None:
        """Loads the model if it is not loaded. Raises an EngineError where it cannot be."""
        if not self.loaded:
            self._begin(self._opened_engine())

    async def ready(self, make_room: Callable[[ServedModel], Awaitable[None]] | None = None) -> None:
        """Returns once the model is loaded. ApiError 503 where it cannot be, or ``make_room`` finds none for it."""
        async with self._loading:
            if self.loaded:
                return
            try:
                engine = await asyncio.to_thread(self._opened_engine)
            except EngineError as error:
                log("not_loaded", model=self.name, error=str(error))
                why = f"{self.name} cannot be loaded: {without_folders(str(error))}"
                raise ApiError(503, why, "model", "model_not_loaded") from error
            if make_room is not None:
                try:
                    await make_room(self)
                except ApiError:
                    del engine
                    await asyncio.to_thread(self._free)
                    raise
            self._begin(engine)

    def _opened_engine(self) -> Engine:
        try:
            engine = self._open(self._opened)
        except BaseException:
            self._opened.close()
            raise
        self._opened.callback(engine.close)
        memory = engine.loaded.memory
        self.bytes = memory.weights + memory.kv + memory.history
        return engine

    def _begin(self, engine: Engine) -> None:
        self.used_at, self.keep_s = time.monotonic(), self._usual_keep_s
        self._llm, self._turns = AsyncLLM(engine), None

    def _free(self) -> None:
        """What is closed refers to itself, and would keep its memory until Python looks for such things by chance."""
        self._opened.close()
        gc.collect()

    def close(self) -> None:
        """Frees the model's memory at the server's end."""
        self._llm = None
        self._opened.close()

    async def retire(self) -> None:
        """Frees the model's memory, unless somebody has begun to use it."""
        async with self._loading:
            if self.loaded and not self.users:
                self._past = self.counts
                self._llm = self._turns = None
                await asyncio.to_thread(self._free)
                log("unloaded", model=self.name)

    def take(self) -> None:
        """For a request: keeps the model loaded until ``release``."""
        self.users += 1

    @property
    def expired(self) -> bool:
        """Whether nobody has used it for long enough."""
        return not self.users and time.monotonic() - self.used_at >= self.keep_s

    def release(self) -> None:
        self.users -= 1
        self.used_at = time.monotonic()

    @property
    def counts(self) -> Counter[str]:
        """What its step loops have counted since the server began, with the times before it was unloaded."""
        found = self._past.copy()
        if self.loaded:
            engine = self.llm.engine
            guesses = engine.speculation()
            found.update(preemptions=engine.scheduler_stats().preemptions, restarts=engine.health().restarts)
            found.update(guessed=guesses.guessed, held=guesses.held)
        return found

    @property
    def recommended(self) -> Mapping[str, float]:
        """How its makers would have it sampled where a request does not say."""
        return self.llm.engine.loaded.checkpoint.sampling

    @property
    def refused(self) -> int:
        """Requests for which there was no room."""
        return self.admission.refused + self.forms.refused

    @property
    def max_model_len(self) -> int:
        return self.llm.engine.loaded.max_model_len

    @property
    def turns(self) -> Turns:
        """What has been answered since the model was loaded. TokenizerError if it has no tokenizer."""
        if self._turns is None:
            self._turns = Turns(self.llm.engine.tokenizer)
        return self._turns

    def priority(self, given: int | None) -> int:
        """ApiError 400 where a request has one and the scheduler looks at none."""
        if given and self.llm.engine.loaded.config.policy != "priority":
            raise ApiError(400, "priority is for servers that run with --policy priority.", "priority")
        return given or 0

    def template(self) -> ChatTemplate:
        found = self.llm.engine.loaded.checkpoint.chat_template()
        if found is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template; use /v1/completions, or /api/generate with raw.",
                code="no_chat_template",
            )
        return found

    def check_context(self, options: ContextOption | None) -> None:
        """A context is never shortened, so that a shorter one than the model's asks for nothing. ApiError 400 for a longer."""
        if options is not None and (options.num_ctx or 0) > self.max_model_len:
            raise ApiError(
                400,
                f"num_ctx is {options.num_ctx}, and the context of {self.name} holds {self.max_model_len}; start the server"
                " with a greater --max-context.",
                "options.num_ctx",
            )
