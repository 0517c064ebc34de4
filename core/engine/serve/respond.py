"""A request's answer, given whole or as a stream: either way it ends when the client leaves, and the log has its figures."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from engine.runtime.outputs import RequestOutput

from .generation import Generation, Output
from .lanes import beside
from .sse import Event, EventStream, answered, encoded

Outputs = AsyncGenerator[Output, None]
_PARTED = 5
"""Levels of an answer that are written in parts: down to the items of a choice's logprobs."""
_PIECE = 1000  # numbers or texts
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def last_outputs(request: Request, generation: Generation) -> list[RequestOutput]:
    """The last output of each prompt, for an answer that is given whole. ClientGoneError if the client leaves before."""
    try:
        outputs = await answered(request, generation.last())
    finally:
        generation.close()
    _note(request, outputs)
    return outputs


async def written(make: Callable[[], Any]) -> Response:
    """What ``make`` gives as JSON, made and written down beside the event loop: a million numbers take a while."""
    text = await beside(lambda: _json(make()).encode())
    return Response(text, media_type="application/json")


def _json(value: Any, depth: int = 0) -> str:
    """As json writes it, in parts, between which others run: json does not let go of the interpreter before it is done."""
    if depth == _PARTED or not value or not isinstance(value, (dict, list)):
        return _JSON.encode(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_JSON.encode(key)}:{_json(part, depth + 1)}" for key, part in value.items()) + "}"
    if isinstance(value[-1], (dict, list)):
        return "[" + ",".join(_json(part, depth + 1) for part in value) + "]"
    pieces = (value[at : at + _PIECE] for at in range(0, len(value), _PIECE))
    return "[" + ",".join(_JSON.encode(piece)[1:-1] for piece in pieces) + "]"


def stream(
    request: Request,
    generation: Generation,
    events: Callable[[Outputs], AsyncGenerator[Event, None]],
    encode: Callable[[Event], bytes] = encoded,
    media_type: str = "text/event-stream",
) -> EventStream:
    """An answer that is sent as it comes: ``events`` makes of the outputs what the protocol says to them, and to their end."""

    outputs = generation.outputs()
    return EventStream(
        events(outputs),
        outputs,
        lambda: _note(request, generation.latest.values()),
        generation.close,
        encode,
        media_type,
    )


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
