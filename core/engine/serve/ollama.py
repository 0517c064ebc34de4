"""Ollama's /api: chat, generate, tags, ps, show and version, by way of the chat's and the plain completions' machinery."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from engine import __version__
from engine.answers import PartialCall, Parts, reasons
from engine.runtime.outputs import RequestOutput

from .chat import Chat, prepare, prepare_raw
from .deltas import arguments_of
from .errors import ApiError, named
from .fields import AskedOfOllama, ChatBody, ContextOption, Listed, Loose, Nothing, Tool
from .keep_alive import KeepAlive
from .model import ServedModel
from .models import Models
from .respond import Outputs, last_outputs, stream
from .sse import Event, answered, line

_FOR_EVER_S = 100 * 365 * 86400.0
"""From twenty years on Ollama's program says so."""
_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


class Options(ContextOption):
    """Those of Ollama's options that the sampler has, and ``num_ctx`` where the model's context is as long."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | Listed[str] | None = None

    def fields(self) -> dict[str, Any]:
        """As a chat's. There a seed of -1 is any, and so many tokens are no limit: up to the context's end."""
        found = self.model_dump(exclude_none=True, exclude={"num_ctx"})
        if found.get("num_predict") in (-1, -2):
            del found["num_predict"]
        if found.get("seed") == -1:
            del found["seed"]
        return {_RENAMED.get(name, name): value for name, value in found.items()}


_NAMES = {_RENAMED.get(name, name): f"options.{name}" for name in Options.model_fields} | {
    "response_format": "format",
    "reasoning_effort": "think",
    "chat_template_kwargs": "think",
}
"""What a request calls the chat's fields."""


class FunctionOfCall(AskedOfOllama):
    name: str
    arguments: Loose
    index: int | None = None


class CallOfTurn(AskedOfOllama):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionOfCall


class Turn(AskedOfOllama):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Listed[CallOfTurn] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Nothing = None

    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            found["reasoning_content"] = self.thinking
        if self.tool_name is not None:
            found["name"] = self.tool_name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
                    },
                }
                for call in self.tool_calls
            ]
        return found


def _with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls without an id have one, of nine characters as Mistral's templates want it, and so has the result of each: that of
    the first call by its name, or of the first of all where it has none."""
    numbers = count(1)
    unanswered: defaultdict[str | None, deque[str]] = defaultdict(deque)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or f"{next(numbers):09}"
            for name in (call["function"]["name"], None):
                unanswered[name].append(call["id"])
        if message["role"] == "tool" and "tool_call_id" not in message and (ids := unanswered[message.get("name")]):
            message["tool_call_id"] = ids.popleft()
    return messages


class Asked(AskedOfOllama):
    model: str
    stream: bool = True
    format: Literal["json", ""] | Loose | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {"stream": self.stream, **(self.options.fields() if self.options else {})}
        if isinstance(self.think, str):
            found["reasoning_effort"] = self.think
        elif self.think is not None:
            found["chat_template_kwargs"] = {"enable_thinking": self.think}
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}
        return found


class ChatAsked(Asked):
    """POST /api/chat."""

    messages: Listed[Turn]
    tools: Listed[Tool] | None = None

    def chat(self) -> ChatBody:
        messages = _with_ids([turn.message() for turn in self.messages])
        tools = None if self.tools is None else [tool.model_dump(exclude_none=True) for tool in self.tools]
        goes_on = self.messages[-1].role == "assistant"
        return ChatBody(messages=messages, tools=tools, continue_final_message=goes_on, **self.fields())  # type: ignore[arg-type]


class GenerateAsked(Asked):
    """POST /api/generate: a message of a person alone, with ``system`` before it; ``raw``: a text as it is."""

    prompt: str = ""
    system: str | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    raw: bool | None = None
    context: Nothing = None
    images: Nothing = None

    def chat(self) -> ChatBody:
        turns = [Turn(role="user", content=self.prompt)]
        if self.system:
            turns.insert(0, Turn(role="system", content=self.system))
        shared = self.model_dump(include={"model", "stream", "format", "think"})
        return ChatAsked(**shared, options=self.options, messages=turns).chat()


class ShowAsked(AskedOfOllama):
    """POST /api/show; ``name`` is what older clients say for ``model``. Ollama's own says both, and what is nothing."""

    model: str
    name: str | None = None
    system: Literal[""] | None = None
    template: Literal[""] | None = None
    options: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    verbose: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_its_older_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and not given.get("model") and given.get("name"):
            return {**given, "model": given["name"]}
        return given


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    async def answer(asked: ChatAsked | GenerateAsked, request: Request) -> Response:
        start = time.monotonic()
        chatting = isinstance(asked, ChatAsked)
        nothing = not (asked.messages if isinstance(asked, ChatAsked) else asked.prompt)
        if nothing and asked.keep_alive == 0:
            return JSONResponse(_done(await models.unload(asked.model), chatting, "unload"))
        model = await models.find_tagged(asked.model, asked.keep_alive)
        if nothing:
            return JSONResponse(_done(model, chatting, "load"))
        model.check_context(asked.options)
        if asked.think is True and "thinking" not in _abilities(model):
            raise ApiError(400, f"think is true, and the chat template of {model.name} knows no thinking.", "think")
        with named(_NAMES if chatting else _NAMES | {"messages": "prompt"}):
            chat = await answered(request, _prepared(model, asked, request.state.caller))
        form = _Form(chat, chatting, start)
        if asked.stream:
            return stream(request, chat.generation, partial(_pieces, chat, form), _line, "application/x-ndjson")
        output = (await last_outputs(request, chat.generation))[0]
        return JSONResponse(form.piece(Parts(), chat.parts(output.outputs[0]), done=True) | form.ending(output))

    @router.post("/api/chat")
    async def chat(body: ChatAsked, request: Request) -> Response:
        """An answer to a conversation, in Ollama's form."""
        return await answer(body, request)

    @router.post("/api/generate")
    async def generate(body: GenerateAsked, request: Request) -> Response:
        """An answer to a single prompt, in Ollama's form."""
        return await answer(body, request)

    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The models that are served."""
        return {"models": [_described(model) for model in models.by_name.values()]}

    @router.get("/api/ps")
    async def loaded() -> dict[str, Any]:
        """The models that are in memory."""
        return {"models": [_in_memory(model) for model in models.loaded]}

    @router.post("/api/show")
    async def show(body: ShowAsked) -> dict[str, Any]:
        model = await models.find_tagged(body.model)
        described = _described(model)
        family = model.llm.engine.loaded.model.family
        info = {"general.architecture": family, f"{family}.context_length": model.max_model_len}
        found = {name: described[name] for name in ("modified_at", "details")}
        return {**found, "model_info": info, "capabilities": _abilities(model)}

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return router


async def _prepared(model: ServedModel, asked: ChatAsked | GenerateAsked, caller: str) -> Chat:
    """ApiError 400 for ``raw`` beside what only a chat template could tell the model."""
    if isinstance(asked, ChatAsked) or not asked.raw:
        return await prepare(model, asked.chat(), caller)
    if other := "system" if asked.system else "think" if asked.think else None:
        raise ApiError(400, f"raw has the prompt given as it is, without {other}; leave one out.", other)
    return await prepare_raw(model, asked.prompt, asked.chat(), caller)


def _done(model: ServedModel, chatting: bool, what: str) -> dict[str, Any]:
    """What says nothing asks that the model be loaded or unloaded, as it is by now."""
    said = {"message": {"role": "assistant", "content": ""}} if chatting else {"response": ""}
    now = datetime.now(UTC).isoformat()
    return {"model": model.name, "created_at": now, **said, "done": True, "done_reason": what}


def _abilities(model: ServedModel) -> list[str]:
    """By Ollama's names; tools and thoughts are the chat template's."""
    loaded = model.llm.engine.loaded
    if not loaded.model.generates:
        return ["embedding"]
    template = loaded.checkpoint.chat_template()
    named = {"tools": ("tools",), "thinking": ("enable_thinking", "reasoning_effort")}
    read = {name for names in named.values() for name in names if template is not None and template.reads(name)}
    able = {what for what, names in named.items() if read.intersection(names)}
    if template is not None and reasons(template.source):  # it thinks whether or not it is asked to
        able.add("thinking")
    return ["completion", "embedding", *sorted(able, reverse=True)]


def _described(model: ServedModel) -> dict[str, Any]:
    """What is known of a model; of its kind only once it is loaded. Ollama's list shows twelve letters of a digest, and ends
    with a fault where they are not there."""
    modified = datetime.fromtimestamp(model.created, UTC).isoformat()
    digest = hashlib.sha256(model.name.encode()).hexdigest()
    found = {
        "name": model.name,
        "model": model.name,
        "modified_at": modified,
        "size": 0,
        "digest": digest,
        "details": {},
    }
    if model.loaded:
        loaded = model.llm.engine.loaded
        family, kind = loaded.model.family, loaded.checkpoint.kind
        found["size"] = loaded.memory.weights
        found["details"] = {"format": kind, "family": family, "families": [family], "parent_model": ""}
    return found


def _in_memory(model: ServedModel) -> dict[str, Any]:
    """Clients show which share of ``size`` lies in memory of the device's own, and until when it is there."""
    own = model.llm.engine.loaded.device.describe().own_memory
    memory = {"size": model.bytes, "size_vram": model.bytes if own else 0, "context_length": model.max_model_len}
    idle_s = 0.0 if model.users else time.monotonic() - model.used_at
    expires = datetime.now(UTC) + timedelta(seconds=min(model.keep_s, _FOR_EVER_S) - idle_s)
    return {**_described(model), **memory, "expires_at": expires.isoformat()}


def _line(event: Event) -> bytes:
    """An object on a line of its own."""
    return line(event) + b"\n"


class _Form:
    """Pieces of answers as Ollama's clients read them."""

    def __init__(self, chat: Chat, chatting: bool, start: float) -> None:
        self._name, self._chatting, self._start = chat.model.name, chatting, start

    def piece(self, before: Parts, parts: Parts, done: bool) -> dict[str, Any]:
        """What is new; calls come whole, with the last piece."""
        text, thought = parts.content[len(before.content) :], parts.reasoning[len(before.reasoning) :]
        head = {"model": self._name, "created_at": datetime.now(UTC).isoformat(), "done": done}
        thinking = {"thinking": thought} if thought else {}
        if not self._chatting:
            return {**head, "response": text, **thinking}
        calls = [_called(call) for call in parts.calls] if done else []
        message = {"role": "assistant", "content": text, **thinking} | ({"tool_calls": calls} if calls else {})
        return {**head, "message": message}

    def ending(self, output: RequestOutput) -> dict[str, Any]:
        """Why it has ended, and its figures, times in nanoseconds."""
        times = output.metrics
        first, last = times.first_token or times.arrival, times.last_token or times.arrival
        return {
            "done_reason": output.outputs[0].finish_reason,
            "total_duration": int((time.monotonic() - self._start) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": int((first - times.arrival) * 1e9),
            "eval_count": output.outputs[0].num_tokens,
            "eval_duration": int((last - first) * 1e9),
        }


def _called(call: PartialCall) -> dict[str, Any]:
    own = {"id": call.id} if call.id else {}
    return {**own, "function": {"name": call.name, "arguments": arguments_of(call.arguments)}}


async def _pieces(chat: Chat, form: _Form, outputs: Outputs) -> AsyncGenerator[Event, None]:
    before = Parts()
    async for _, output in outputs:
        parts = chat.parts(output.outputs[0])
        if output.finished or (parts.content, parts.reasoning) != (before.content, before.reasoning):
            piece = form.piece(before, parts, output.finished)
            before = parts
            yield piece | form.ending(output) if output.finished else piece
