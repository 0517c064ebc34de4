"""POST /v1/messages: Anthropic's protocol, by way of the chat's."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from engine.runtime.outputs import RequestOutput

from .blocks import Block, Blocks, Step, blocks
from .chat import Chat, finish_reason, prepare, prompt
from .deltas import arguments_of
from .errors import named
from .fields import Body, ChatBody, Listed, Loose
from .model import ServedModel
from .models import Models
from .respond import Outputs, last_outputs, stream, usage
from .sse import Event, answered, encoded

_NAMES = {"stop": "stop_sequences", "reasoning_effort": "thinking", "response_format": "output_config.format"}
"""What a request calls the chat's fields."""
_CALL = "toolu_"
"""How ids of calls begin there; templates know them without."""


class Text(Body):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: None = None


class Thinking(Body):
    """What the chat template shows to the model again is its own affair."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUse(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Loose
    cache_control: dict[str, Any] | None = None


class ToolResult(Body):
    """``is_error``: the model is shown it as an error."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Listed[Text] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


Part = Annotated[Text | Thinking | ToolUse | ToolResult, Field(discriminator="type")]


class Turn(Body):
    role: Literal["user", "assistant"]
    content: str | Listed[Part]


class ToolOfMessages(Body):
    """``type`` comes first, and so its fault: tools of other kinds have no schema."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Loose
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class Choice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class WhetherToThink(Body):
    """``adaptive`` leaves it to the model, as is so anyway; a budget of tokens cannot be kept."""

    type: Literal["disabled", "adaptive"]


class AnswerFormat(Body):
    """The answer is valid by the schema."""

    type: Literal["json_schema"]
    schema_: Loose = Field(alias="schema")


class OutputConfig(Body):
    format: AnswerFormat | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens. What ``cache_control`` asks for is so anyway."""

    model: str
    messages: Listed[Turn] = Field(min_length=1)
    system: str | Listed[Text] | None = None
    tools: Listed[ToolOfMessages] | None = None
    tool_choice: Annotated[Choice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: WhetherToThink | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None

    def fields(self, model: ServedModel) -> dict[str, Any]:
        """As those of a chat with this model."""
        found: dict[str, Any] = {"model": self.model, "messages": [*self._system(), *self._turns()]}
        if self.messages[-1].role == "assistant":
            found["continue_final_message"] = True
        thinks = model.template().reads("enable_thinking")
        if thinks and self.thinking is not None and self.thinking.type == "disabled":
            found["reasoning_effort"] = "none"
        if self.tools:
            found["tools"] = [_tool(tool) for tool in self.tools]
        if isinstance(self.tool_choice, NamedChoice):
            found["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            found["tool_choice"] = {"any": "required"}.get(self.tool_choice.type, self.tool_choice.type)
        if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use:
            found["parallel_tool_calls"] = False
        if self.output_config is not None and (wanted := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": wanted.schema_}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        return found

    def _system(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": _joined(self.system)}] if self.system else []

    def _turns(self) -> Iterator[dict[str, Any]]:
        for turn in self.messages:
            parts = [Text(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
            for result in parts:
                if isinstance(result, ToolResult):
                    content = ("Error: " if result.is_error else "") + _joined(result.content or "")
                    yield {"role": "tool", "tool_call_id": result.tool_use_id.removeprefix(_CALL), "content": content}
            texts = [part for part in parts if isinstance(part, Text)]
            calls = [_call(part) for part in parts if isinstance(part, ToolUse)]
            thoughts = "".join(part.thinking for part in parts if isinstance(part, Thinking))
            if texts or calls or thoughts:
                said = {"role": turn.role, "content": _joined(texts), "reasoning_content": thoughts or None}
                yield said | ({"tool_calls": calls} if calls else {})


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Listed[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def chat(self, model: ServedModel) -> ChatBody:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        return ChatBody(**self.fields(model), stop=self.stop_sequences, **{name: getattr(self, name) for name in names})


def _joined(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _call(part: ToolUse) -> dict[str, Any]:
    arguments = json.dumps(part.input, ensure_ascii=False)
    function = {"name": part.name, "arguments": arguments}
    return {"id": part.id.removeprefix(_CALL), "type": "function", "function": function}


def _tool(tool: ToolOfMessages) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        """An answer to a conversation, in Anthropic's form."""
        model = await models.find(body.model)
        with named(_NAMES):
            chat = await answered(request, prepare(model, body.chat(model), request.state.caller))
        head = {"id": f"msg_{request.state.request_id}", "type": "message", "role": "assistant", "model": model.name}
        if body.stream:
            return stream(request, chat.generation, partial(_events, chat, head), _named)
        output = (await last_outputs(request, chat.generation))[0]
        parts = chat.parts(output.outputs[0])
        content = [_content(block, block.text) for block in blocks(parts)]
        return JSONResponse({**head, "content": content, **_ending(output, bool(parts.calls)), "usage": _usage(output)})

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
        """How many tokens the prompt of a conversation has."""
        model = await models.find(body.model)
        with named(_NAMES):
            _, ids = await prompt(model, ChatBody(**body.fields(model)), request.state.caller)
        return {"input_tokens": len(ids)}

    return router


def _content(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": f"{_CALL}{block.id}", "name": block.name, "input": arguments_of(text)}


def _ending(output: RequestOutput, calls: bool) -> dict[str, Any]:
    completion = output.outputs[0]
    stopped = completion.stop_reason if isinstance(completion.stop_reason, str) else None
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    reason = reasons.get(str(finish_reason(completion, calls)), "stop_sequence" if stopped else "end_turn")
    return {"stop_reason": reason, "stop_sequence": stopped if reason == "stop_sequence" else None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    counts = usage([output])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,  # there cached tokens are counted apart
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
    }


def _named(event: Event) -> bytes:
    """Events have their type as a name, too; a fault is one of them."""
    assert isinstance(event, dict)
    return f"event: {event['type']}\n".encode() + encoded(event)


_DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


async def _events(chat: Chat, head: dict[str, Any], outputs: Outputs) -> AsyncGenerator[Event, None]:
    state, begun = Blocks(), False
    async for _, output in outputs:
        completion = output.outputs[0]
        if not begun and not completion.text and not output.finished:
            continue
        if not begun:
            begun = True
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(output)}
            yield {"type": "message_start", "message": {**head, **empty}}
        for step, block, text in state.advance(chat.parts(completion), output.finished):
            yield _event(step, block, text)
    calls = any(block.kind == "call" for block in state.blocks)
    yield {"type": "message_delta", "delta": _ending(output, calls), "usage": _usage(output)}
    yield {"type": "message_stop"}


def _event(step: Step, block: Block, text: str) -> dict[str, Any]:
    if step == "start":
        return {"type": "content_block_start", "index": block.index, "content_block": _content(block, "")}
    if step == "stop":
        return {"type": "content_block_stop", "index": block.index}
    kind, name = _DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}
