"""A conversation and the answer to it, whatever the protocol: the prompt, the tools, what is sampled, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.answers import OPEN, Parts, Reader
from engine.runtime.outputs import CompletionOutput
from engine.sampling import SamplingParams, StructuredOutputs

from .errors import ApiError
from .fields import ChatBody, NamedTool, Tool
from .generation import Generation, begin
from .keys import salt_of
from .model import ServedModel
from .prompts import chat_prompt
from .tracing import current


@dataclass(frozen=True)
class Chat:
    """A conversation whose answer is on its way."""

    model: ServedModel
    generation: Generation
    reader: Reader
    best: int

    def parts(self, completion: CompletionOutput) -> Parts:
        """What has come, taken apart."""
        return self.reader.read(completion.text, completion.finish_reason is not None)


async def prepare(model: ServedModel, body: ChatBody, caller: str) -> Chat:
    """Renders, checks and takes a place; ApiError or EngineError where that cannot be done."""
    tools = _tools(body)
    forced = _forced_call(body, tools)
    params = _params(body, model, forced)
    text, ids = await prompt(model, body, caller)
    room = model.max_model_len - len(ids)
    if params.max_tokens is None and room < 1:
        raise ApiError(
            400,
            f"The conversation has {len(ids)} tokens; the context of {model.name} holds {model.max_model_len}.",
            "messages",
            "context_length_exceeded",
        )
    # an answer in a form of its own is no call, whatever it looks like
    formed = forced is None and params.structured_outputs is not None
    reader = Reader(
        frozenset(() if formed else (tool.function.name for tool in tools)),
        inside=text.rstrip().endswith(OPEN),
        plain=params.structured_outputs is not None,
        one_call=forced is not None or body.parallel_tool_calls is False,
    )
    salt = salt_of(caller, body.cache_salt or "")
    generation = await begin(model, [ids], params, caller, bool(body.stream), model.priority(body.priority), salt, text)
    return Chat(model, generation, reader, body.top_logprobs or 0)


async def prompt(model: ServedModel, body: ChatBody, caller: str) -> tuple[str, tuple[int, ...]]:
    """The conversation as the model is given it, as text and as ids."""
    variables = _template_variables(body, model)
    described = [tool.model_dump(exclude_none=True) for tool in _tools(body)]
    messages = body.templated()
    if trace := current.get():
        trace.asked(messages)
    return await chat_prompt(model, messages, described, variables, body.ending, salt_of(caller, body.cache_salt or ""))


def _template_variables(body: ChatBody, model: ServedModel) -> dict[str, Any]:
    """What the template is told beside the conversation."""
    given, effort = body.chat_template_kwargs or {}, body.reasoning_effort
    if effort is None:
        return given
    name, value = ("enable_thinking", False) if effort == "none" else ("reasoning_effort", effort)
    if not model.template().reads(name):
        raise ApiError(
            400,
            f"The field reasoning_effort is {effort!r}, and the chat template of {model.name} has no {name}; leave it out.",
            "reasoning_effort",
        )
    if name in given:
        raise ApiError(
            400, f"reasoning_effort and chat_template_kwargs both set {name}; leave one out.", "reasoning_effort"
        )
    return {**given, name: value}


def _params(body: ChatBody, model: ServedModel, forced: StructuredOutputs | None) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same; leave one out.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs; set it to true.", "top_logprobs")
    if forced is not None and body.form() is not None:
        raise ApiError(400, "A call of a tool is forced, and a form is asked for, too; leave one out.", "tool_choice")
    most = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    params = body.sampling(
        model.recommended,
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=forced,
    )
    if most is not None:
        return params
    return replace(params, max_tokens=None)  # up to the context's end


def _tools(body: ChatBody) -> list[Tool]:
    """Those that the model is told of."""
    if body.tool_choice is not None and body.tool_choice != "none" and not body.tools:
        raise ApiError(400, "tool_choice is given, and there are no tools.", "tool_choice")
    return [] if body.tool_choice == "none" else body.tools or []


def _forced_call(body: ChatBody, tools: list[Tool]) -> StructuredOutputs | None:
    """The form of a call that the model must make."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise ApiError(400, f"tool_choice names {choice.function.name}, and there is no such tool.", "tool_choice")
    return StructuredOutputs(json={"anyOf": [_call_schema(tool, n) for n, tool in enumerate(tools)]})


def _call_schema(tool: Tool, place: int) -> dict[str, Any]:
    """Of a call of the tool, at this place among others."""
    arguments = _moved(tool.function.parameters or {"type": "object"}, f"#/anyOf/{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema that has become a part of another, where its references begin at ``to``."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, to) for name, part in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def finish_reason(completion: CompletionOutput, calls: bool) -> str | None:
    return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
