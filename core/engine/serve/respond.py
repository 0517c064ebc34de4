"""A request's answer, given whole or as a stream: either way it ends when the client leaves, and the log has its figures."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import Request

from engine.runtime.outputs import RequestOutput

from .generation import Generation, Output
from .sse import Event, EventStream, answered, encoded

Outputs = AsyncGenerator[Output, None]


async def last_outputs(request: Request, generation: Generation) -> list[RequestOutput]:
    """The last output of each prompt, for an answer that is given whole. ClientGoneError if the client leaves before."""
    try:
        outputs = await answered(request, generation.last())
    finally:
        generation.close()
    _note(request, outputs)
    return outputs


def stream(
    request: Request,
    generation: Generation,
    events: Callable[[Outputs], AsyncGenerator[Event, None]],
    encode: Callable[[Event], bytes] = encoded,
    media_type: str = "text/event-stream",
) -> EventStream:
    """An answer that is sent as it comes: ``events`` makes of the outputs what the protocol says to them, and to their end."""

    async def made() -> AsyncGenerator[Event, None]:
        async with aclosing(_noted(request, generation)) as outputs, aclosing(events(outputs)) as found:
            async for event in found:
                yield event

    return EventStream(made(), generation.close, encode, media_type)


async def _noted(request: Request, generation: Generation) -> Outputs:
    last: dict[int, RequestOutput] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            last[index] = output
            yield index, output
    _note(request, last.values())


def _note(request: Request, outputs: Iterable[RequestOutput]) -> None:
    """Figures of a request for its line in the log."""
    outputs = list(outputs)
    figures: dict[str, Any] = request.state.figures
    counts = usage(outputs)
    figures |= {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}
    figures["cached_tokens"] = counts["prompt_tokens_details"]["cached_tokens"]
    first = [o.metrics.first_token - o.metrics.arrival for o in outputs if o.metrics.first_token is not None]
    if first:
        figures["ttft_s"] = round(min(first), 4)


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Tokens of a request, those of discarded samples with them; cached ones are prompt tokens that the prefix cache had."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(output.num_generated_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
