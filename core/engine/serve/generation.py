"""A request on its way: through the queue and the engine, to its end or its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial

from engine.errors import EngineStoppedError, RequestError
from engine.runtime.members import NO_TOKEN, STATUS
from engine.runtime.outputs import CompletionOutput, RequestOutput
from engine.runtime.prepared import Prepared
from engine.runtime.turns import Turns
from engine.sampling import SamplingParams, StructuredOutputs

from .admission import Place
from .errors import ApiError, api_error
from .lanes import beside, compiling, lane, later
from .model import ServedModel
from .tracing import current

_MAX_LOGPROBS = 1 << 22
"""Of a request's sequences: their answer is made and written down within some seconds."""
Output = tuple[int, RequestOutput]
"""A prompt's index, and what has come of it."""


async def begin(
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    caller: str,
    stream: bool,
    priority: int = 0,
    salt: bytes = b"",
    conversation: str | None = None,
    shown: Callable[[RequestOutput], RequestOutput] | None = None,
) -> Generation:
    """Takes a place for a request with one or several prompts, of which half of what there is room for run at a time where
    that is not enough for all; ``conversation`` is the text of one whose answers are to be known in its next turn, and
    ``shown`` makes of outputs what is to be seen of them. It has no place before it can begin: a form is compiled first.
    ApiError or EngineError where it is wrong or there is no room; ``Generation.close`` must be called in the end."""
    start = time.monotonic()
    stream = stream and params.samples == params.n
    for prompt in prompts:
        _check_length(model, len(prompt), params)
    _check_logprobs(model, prompts, params)
    room = max(model.admission.capacity // params.samples, 1)
    together = len(prompts) if len(prompts) <= room else max(room // 2, 1)  # long ones leave room for others
    weight = together * params.samples
    model.admission.check(caller, weight)
    async with _in_time(model, start):
        await _compile(model, params.structured_outputs, caller, priority)
    gate = None if together == len(prompts) else asyncio.Semaphore(together)
    prepared = [
        await model.llm.prepare(list(prompt), params, None, priority, stream, salt, lane(), gate) for prompt in prompts
    ]
    remember = None if conversation is None else partial(_remember, model.turns, conversation, salt)
    place = model.admission.enter(caller, weight, priority)
    return Generation(model, prepared, place, start, remember, shown)


async def _compile(model: ServedModel, form: StructuredOutputs | None, caller: str, priority: int) -> None:
    """Returns once the form, if there is one, is known: they are compiled one at a time, in turn for each caller."""
    if form is None or model.llm.engine.knows_form(form):
        return
    place = model.forms.enter(caller, 1, priority)
    try:
        await place.turn()
        await compiling(partial(model.llm.engine.compile_form, form))
    finally:
        place.leave()


def _check_length(model: ServedModel, prompt: int, params: SamplingParams) -> None:
    """What the scheduler would refuse too, but only once it is the request's turn."""
    if not prompt:
        raise ApiError(400, "The prompt is empty.", "prompt")
    asked = "min_tokens" if params.max_tokens is None else "max_tokens"
    more = params.max_tokens or max(params.min_tokens, 1)
    if prompt + more > model.max_model_len:
        raise ApiError(
            400,
            f"The prompt has {prompt} tokens, and {more} more are to be generated; the context of"
            f" {model.name} holds {model.max_model_len}.",
            asked if prompt < model.max_model_len else "prompt",
            "context_length_exceeded",
        )


def _check_logprobs(model: ServedModel, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Those of several sequences are bounded; those of one are by the context."""
    if len(prompts) * params.samples == 1:
        return
    wanted = 0
    for prompt in prompts:
        made = params.max_tokens or model.max_model_len - len(prompt)
        if params.logprobs is not None:
            wanted += params.samples * made * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            wanted += params.samples * len(prompt) * (params.prompt_logprobs + 1)
    if wanted > _MAX_LOGPROBS:
        raise ApiError(
            400,
            f"The request may have {wanted} logprobs, and at most {_MAX_LOGPROBS} are given; ask for fewer logprobs, for fewer"
            " sequences at a time, or for fewer tokens with max_tokens.",
            "logprobs",
        )


def _remember(turns: Turns, conversation: str, salt: bytes, output: RequestOutput) -> None:
    for completion in output.outputs:
        turns.remember(conversation, completion.text, completion.token_ids, salt)


class Generation:
    """The prompts of one request, on their way through the queue and the engine."""

    def __init__(
        self,
        model: ServedModel,
        prepared: Sequence[Prepared],
        place: Place,
        start: float,
        remember: Callable[[RequestOutput], None] | None = None,
        shown: Callable[[RequestOutput], RequestOutput] | None = None,
    ) -> None:
        self._model = model
        self._prepared = prepared
        self._place = place
        self._start = start
        self._observed = [model.figures.observed(each.request, start) for each in prepared]
        self._remember = remember
        self._shown = shown or (lambda output: output)
        self.latest: dict[int, RequestOutput] = {}
        """The last output of each prompt so far, as it is shown."""

    def close(self) -> None:
        self._place.leave()
        for observed in self._observed:
            observed.left()

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Outputs as they come, each with all before it, and one of each prompt at least. Leaving the iterator aborts the
        request. ApiError 504 when the deadline has passed, and 400 or 500 when the engine ends a sequence by a fault."""
        source = self._single() if len(self._prepared) == 1 else self._merged()
        deadline: asyncio.TimerHandle | None = None
        first = self._prepared[0].request
        if trace := current.get():
            trace.begun(self._model.name, first.params, first.stream, self._place)
        unfinished: dict[int, RequestOutput] = {}
        ending = asyncio.ensure_future(self._leave_when_done())
        async with aclosing(source) as outputs:
            try:
                async with _in_time(self._model, self._start):
                    await self._place.turn()
                deadline = self._interrupt_late()
                async for index, output in outputs:
                    if trace:
                        trace.take(index, output)
                    for completion in output.outputs:
                        _check(completion)
                    unfinished[index] = output
                    if output.finished and self._remember is not None:
                        await beside(partial(self._remember, unfinished.pop(index)))
                    self.latest[index] = self._shown(output)
                    yield index, self.latest[index]
            except Exception as error:
                if trace:
                    trace.failed(str(api_error(error).status))
                if isinstance(error, EngineStoppedError):  # a step loop that hangs tells nobody
                    for observed in self._observed:
                        observed.end("error")
                    if self._model.admission.draining:  # it has waited for its turn until there was none any more
                        raise _shut_down() from error
                raise
            finally:
                if deadline is not None:
                    deadline.cancel()
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
        async with aclosing(self.outputs()) as outputs:
            async for _ in outputs:
                pass
        return [self.latest[index] for index in sorted(self.latest)]

    def _interrupt_late(self) -> asyncio.TimerHandle | None:
        """Has prompts interrupted when the deadline has passed: a clock for each output would take as long as all else."""
        limit = self._model.deadline_s
        if limit is None:
            return None

        def interrupt() -> None:
            for prepared in self._prepared:
                prepared.interrupt(_late(limit))

        return asyncio.get_running_loop().call_later(self._start + limit - time.monotonic(), interrupt)

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


@asynccontextmanager
async def _in_time(model: ServedModel, start: float) -> AsyncGenerator[None, None]:
    """ApiError 504 when the deadline of a request that began at ``start`` has passed."""
    limit = model.deadline_s
    left = None if limit is None else start + limit - time.monotonic()
    try:
        async with asyncio.timeout(left):
            yield
    except TimeoutError as error:
        assert limit is not None
        raise _late(limit) from error


def _late(limit: float) -> ApiError:
    return ApiError(504, f"The request took longer than {limit:g} s.", code="deadline")


def _check(completion: CompletionOutput) -> None:
    """Raises what ended a sequence other than its own end."""
    if completion.finish_reason == "abort":
        raise _shut_down()
    if completion.finish_reason == "error":
        reason = str(completion.stop_reason)
        if reason == STATUS[NO_TOKEN] or reason.startswith("The grammar"):
            raise RequestError(reason)
        raise ApiError(500, reason)


def _shut_down() -> ApiError:
    return ApiError(503, "The request was ended, since the server shuts down.", code="shutting_down")
