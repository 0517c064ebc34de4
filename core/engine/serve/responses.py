"""POST /v1/responses: OpenAI's newer protocol, by way of the chat's."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.runtime.outputs import RequestOutput

from .blocks import Block, Blocks, Step, blocks
from .chat import Chat, prepare
from .errors import named
from .models import Models
from .respond import Outputs, last_outputs, stream, usage
from .responses_body import NAMES, ResponsesBody
from .sse import Event, answered, encoded


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """An answer in the form of a list of items."""
        model = await models.find(body.model)
        with named(NAMES):
            chat = await answered(request, prepare(model, body.chat(), request.state.caller))
        head = _head(body, model.name, request.state.request_id)
        if body.stream:
            return stream(request, chat.generation, partial(_events, chat, head), _numbered())
        output = (await last_outputs(request, chat.generation))[0]
        return JSONResponse(_whole(chat, head, blocks(chat.parts(output.outputs[0])), output))

    return router


def _head(body: ResponsesBody, model: str, request_id: str) -> dict[str, Any]:
    """A response before there is anything of it."""
    same = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": None if body.reasoning is None else {"effort": body.reasoning.effort, "summary": None},
        "store": False,
        "text": {
            "format": {"type": "text"},
            **(body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}),
        },
        "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "truncation": "disabled",
        "usage": None,
        **{name: getattr(body, name) for name in same},
    }


def _whole(chat: Chat, head: dict[str, Any], found: list[Block], output: RequestOutput) -> dict[str, Any]:
    cut = output.outputs[0].finish_reason == "length"
    counts = usage([output])
    tokenizer = chat.model.llm.engine.tokenizer
    reasoned = sum(len(tokenizer.encode(block.text)) for block in found if block.kind == "reasoning")
    ending = (
        {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        if cut
        else {"status": "completed"}
    )
    items = [_item(block, "incomplete" if cut and block is found[-1] else "completed") for block in found]
    return {
        **head,
        **ending,
        "output": items,
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(reasoned, counts["completion_tokens"])},
            "total_tokens": counts["total_tokens"],
        },
    }


def _item(block: Block, status: str) -> dict[str, Any]:
    """A block as an item; without text as long as it is in progress."""
    if block.kind == "call":
        named = {"id": f"fc_{block.id}", "call_id": block.id, "name": block.name}
        return {"type": "function_call", **named, "arguments": block.text, "status": status}
    content = [_part(block, block.text)] if status != "in_progress" else []
    if block.kind == "reasoning":
        return {"type": "reasoning", "id": f"rs_{block.id}", "summary": [], "content": content}
    return {"type": "message", "id": f"msg_{block.id}", "role": "assistant", "status": status, "content": content}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _numbered() -> Callable[[Event], bytes]:
    """Events of one stream have numbers, and their type as a name, too; a fault is one of them."""
    numbers = count()

    def encode(event: Event) -> bytes:
        assert isinstance(event, dict)
        if "type" not in event:
            event = {"type": "error", **{name: event["error"][name] for name in ("code", "message", "param")}}
        return f"event: {event['type']}\n".encode() + encoded({**event, "sequence_number": next(numbers)})

    return encode


async def _events(chat: Chat, head: dict[str, Any], outputs: Outputs) -> AsyncGenerator[Event, None]:
    state = Blocks()
    for name in ("created", "in_progress"):
        yield {"type": f"response.{name}", "response": head}
    async for _, output in outputs:
        parts, cut = chat.parts(output.outputs[0]), output.outputs[0].finish_reason == "length"
        last = len(blocks(parts)) - 1 if cut else None
        for step, block, text in state.advance(parts, output.finished):
            for event in _of_block(step, block, text, "incomplete" if block.index == last else "completed"):
                yield event
    whole = _whole(chat, head, state.blocks, output)
    yield {"type": f"response.{whole['status']}", "response": whole}


_NAMES = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


def _of_block(step: Step, block: Block, text: str, status: str) -> Iterator[dict[str, Any]]:
    """The events of a block's step; ``status`` is that at its end."""
    at = {"output_index": block.index}
    name, item = f"response.{_NAMES[block.kind]}", _item(block, "in_progress")
    within = {**at, "item_id": item["id"]} | ({} if block.kind == "call" else {"content_index": 0})
    scored: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
    if step == "start":
        yield {"type": "response.output_item.added", **at, "item": item}
        if block.kind != "call":
            yield {"type": "response.content_part.added", **within, "part": _part(block, "")}
    elif step == "delta":
        yield {"type": f"{name}.delta", **within, "delta": text, **scored}
    else:
        whole = {"arguments" if block.kind == "call" else "text": block.text}
        yield {"type": f"{name}.done", **within, **whole, **scored}
        if block.kind != "call":
            yield {"type": "response.content_part.done", **within, "part": _part(block, block.text)}
        yield {"type": "response.output_item.done", **at, "item": _item(block, status)}
