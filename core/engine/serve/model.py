"""A model that is served, and the requests on their way through it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from functools import partial
from hashlib import blake2b
from typing import Any

from engine.answers import CLOSE, OPEN
from engine.errors import EngineError, RequestError
from engine.formats.chat_template import ChatTemplate
from engine.runtime.async_llm import AsyncLLM, Prepared
from engine.runtime.core import NO_TOKEN, STATUS
from engine.runtime.engine import Engine
from engine.runtime.outputs import CompletionOutput, RequestOutput
from engine.runtime.turns import Turns
from engine.sampling import SamplingParams

from .admission import Admission, Place
from .errors import ApiError, api_error
from .fields import ContextOption, Ending
from .keys import ANYONE
from .lanes import beside, lane, later
from .log import log
from .metrics import Metrics
from .tracing import current

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""What ``chat_template_kwargs`` may not set."""
Output = tuple[int, RequestOutput]
"""A prompt's index, and what has come of it."""


class ServedModel:
    """A model by the name that requests have for it; ``opener`` loads it when it is first asked for, and may put on the
    stack what is to be closed with it."""

    def __init__(
        self,
        name: str,
        opener: Callable[[ExitStack], Engine],
        admission: Admission,
        metrics: Metrics,
        deadline_s: float | None = None,
    ) -> None:
        self.name = name
        self._open = opener
        self._llm: AsyncLLM | None = None
        self._turns: Turns | None = None
        self._opened = ExitStack()
        self._loading = asyncio.Lock()
        self.users = 0
        """Requests that have found the model and not ended."""
        self.used_at = time.monotonic()
        self.bytes = 0
        """Of weights and KV cache, while the model is loaded or as it was last."""
        self.admission = admission
        self.metrics = metrics
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
                raise ApiError(503, f"{self.name} cannot be loaded: {error}", "model", "model_not_loaded") from error
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
        self.used_at = time.monotonic()
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
                self._llm = self._turns = None
                await asyncio.to_thread(self._free)
                log("unloaded", model=self.name)

    def take(self) -> None:
        """For a request: keeps the model loaded until ``release``."""
        self.users += 1

    def release(self) -> None:
        self.users -= 1
        self.used_at = time.monotonic()

    @property
    def recommended(self) -> Mapping[str, float]:
        """How its makers would have it sampled where a request does not say."""
        return self.llm.engine.loaded.checkpoint.sampling

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
            raise ApiError(400, f"{self.name} has no chat template; use /v1/completions.", code="no_chat_template")
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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        ending: Ending = "answer",
    ) -> str:
        """The prompt of a conversation. ApiError 400 where the template has no place for tools that are given, or nothing can
        be continued."""
        if ending == "continued":
            begun = _begun(messages[-1])
            prompt = self.render(messages[:-1], tools, variables)
            # where the template opens reasoning, what is there comes after it
            return f"{prompt.rstrip()}\n\n{CLOSE}\n\n{begun}" if prompt.rstrip().endswith(OPEN) else prompt + begun
        given = dict(variables or {})
        if wrong := next((name for name in RESERVED if name in given), None):
            raise ApiError(400, f"chat_template_kwargs may not set {wrong}.", "chat_template_kwargs")
        template = self.template()
        begin = ending == "answer"
        plain = template.render(messages, begin, **given)
        if not tools:
            return plain
        text = template.render(messages, begin, list(tools), **given)
        if text == plain:
            raise ApiError(400, f"The chat template of {self.name} has no tools; leave them out.", "tools")
        return text

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        ending: Ending = "answer",
        salt: bytes = b"",
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt of a conversation as text and as ids, in which answers that were given under ``salt`` have those that
        were generated."""
        turns = self.turns

        def make() -> tuple[str, tuple[int, ...]]:
            text = self.render(messages, tools, variables, ending)
            return text, turns.encode(text, salt)

        return await beside(make)

    async def encode(self, text: str, add_special: bool = True) -> tuple[int, ...]:
        tokenizer = self.llm.engine.tokenizer
        return tuple(await beside(lambda: tokenizer.encode(text, add_special)))

    async def begin(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: str,
        stream: bool,
        priority: int = 0,
        salt: bytes = b"",
        conversation: str | None = None,
    ) -> Generation:
        """Takes a place for a request with one or several prompts, of which half of what there is room for run at a time where
        that is not enough for all; ``conversation`` is the text of one whose answers are to be known in its next turn. ApiError
        or EngineError where it is wrong or there is no room; ``Generation.close`` must be called in the end."""
        start = time.monotonic()
        stream = stream and params.samples == params.n
        for prompt in prompts:
            self._check_length(len(prompt), params)
        room = max(self.admission.capacity // params.samples, 1)
        together = len(prompts) if len(prompts) <= room else max(room // 2, 1)  # long ones leave room for others
        place = self.admission.enter(caller, together * params.samples, priority)
        try:
            gate = None if together == len(prompts) else asyncio.Semaphore(together)
            threads = lane(slow=params.structured_outputs is not None)
            prepared = [
                await self.llm.prepare(list(prompt), params, None, priority, stream, salt, threads, gate)
                for prompt in prompts
            ]
        except BaseException:
            place.leave()
            raise
        remember = None if conversation is None else partial(_remember, self.turns, conversation, salt)
        return Generation(self, prepared, place, start, self.deadline_s, remember)

    def _check_length(self, prompt: int, params: SamplingParams) -> None:
        """What the scheduler would refuse too, but only once it is the request's turn."""
        if not prompt:
            raise ApiError(400, "The prompt is empty.", "prompt")
        wanted = prompt + (params.max_tokens or 1)
        if wanted > self.max_model_len:
            raise ApiError(
                400,
                f"The prompt has {prompt} tokens, and {params.max_tokens or 1} more are to be generated; the context of"
                f" {self.name} holds {self.max_model_len}.",
                code="context_length_exceeded",
            )


def _begun(message: Mapping[str, Any]) -> str:
    """What there is of an answer that is to go on. ApiError 400 where that is no text."""
    if message["role"] != "assistant" or message.get("tool_calls") or not message["content"].strip():
        raise ApiError(
            400,
            "The last message is to be continued, and it is no text of the assistant's; end with one."
            " Or end with a message to answer.",
            "messages",
        )
    return str(message["content"])


def _remember(turns: Turns, conversation: str, salt: bytes, output: RequestOutput) -> None:
    for completion in output.outputs:
        turns.remember(conversation, completion.text, completion.token_ids, salt)


def salt_of(caller: str, given: str) -> bytes:
    """What keeps callers from probing each other's cached prompts; the same for all where no keys are used."""
    if caller == ANYONE and not given:
        return b""
    return blake2b(f"{caller}\0{given}".encode("utf-8", "replace"), digest_size=16).digest()


class Generation:
    """The prompts of one request, on their way through the queue and the engine."""

    def __init__(
        self,
        model: ServedModel,
        prepared: Sequence[Prepared],
        place: Place,
        start: float,
        deadline_s: float | None,
        remember: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        self._model = model
        self._prepared = prepared
        self._place = place
        self._start = start
        self._deadline = None if deadline_s is None else start + deadline_s
        self._deadline_s = deadline_s
        self._remember = remember

    def close(self) -> None:
        self._place.leave()

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Outputs as they come, each with all before it. Leaving the iterator aborts the request. ApiError 504 when the
        deadline has passed, and 400 or 500 when the engine ends a sequence by a fault."""
        source = self._single() if len(self._prepared) == 1 else self._merged()
        observed = self._model.metrics.request(self._model.name, self._start, self._place)
        first = self._prepared[0].request
        if trace := current.get():
            trace.begun(self._model.name, first.params, first.stream, self._place)
        unfinished: dict[int, RequestOutput] = {}
        ending = asyncio.ensure_future(self._leave_when_done())
        async with aclosing(source), aclosing(self._timed(source)) as outputs:
            try:
                async for index, output in outputs:
                    observed.take(index, output)
                    if trace:
                        trace.take(index, output)
                    for completion in output.outputs:
                        _check(completion)
                    unfinished[index] = output
                    if output.finished and self._remember is not None:
                        await beside(partial(self._remember, unfinished.pop(index)))
                    yield index, output
            except Exception as error:
                if trace:
                    trace.failed(str(api_error(error).status))
                raise
            finally:
                observed.close()
                ending.cancel()
                self.close()  # before the last event is sent: who has it may ask again at once
                if self._remember is not None:
                    for output in unfinished.values():
                        later(partial(self._remember, output))

    async def _leave_when_done(self) -> None:
        """The place is others' once the engine is done, though a slow reader may not have taken what there is."""
        for prepared in self._prepared:
            await prepared.ended()
        self._place.leave()

    async def last(self) -> list[RequestOutput]:
        """The last output of each prompt."""
        found: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                found[index] = output
        return [found[index] for index in sorted(found)]

    async def _timed(self, source: AsyncGenerator[Output, None]) -> AsyncGenerator[Output, None]:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        at = None if left is None else asyncio.get_running_loop().time() + left
        try:
            async with asyncio.timeout_at(at):
                await self._place.turn()
            while True:
                async with asyncio.timeout_at(at):
                    try:
                        item = await anext(source)
                    except StopAsyncIteration:
                        return
                yield item
        except TimeoutError as error:
            raise ApiError(504, f"The request took longer than {self._deadline_s:g} s.", code="deadline") from error

    async def _single(self) -> AsyncGenerator[Output, None]:
        async with aclosing(self._prepared[0].outputs()) as outputs:
            async for output in outputs:
                yield 0, output

    async def _merged(self) -> AsyncGenerator[Output, None]:
        """Outputs of all prompts, in the order in which they come."""
        async with AsyncExitStack() as stack:
            sources = [await stack.enter_async_context(aclosing(prepared.outputs())) for prepared in self._prepared]
            steps = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
            try:
                while steps:
                    done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
                    for step in done:
                        index = steps.pop(step)
                        try:
                            output = step.result()
                        except StopAsyncIteration:
                            continue
                        steps[asyncio.ensure_future(anext(sources[index]))] = index
                        yield index, output
            finally:
                for step in steps:
                    step.cancel()
                await asyncio.gather(*steps, return_exceptions=True)


def _check(completion: CompletionOutput) -> None:
    """Raises what ended a sequence other than its own end."""
    if completion.finish_reason == "abort":
        raise ApiError(503, "The request was ended, since the server shuts down.", code="shutting_down")
    if completion.finish_reason == "error":
        reason = str(completion.stop_reason)
        if reason == STATUS[NO_TOKEN] or reason.startswith("The grammar"):
            raise RequestError(reason)
        raise ApiError(500, reason)
