"""What an answer may be where there are tools: a call, a text of the form that is asked for, or any text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine.answers import Tools, thoughts_are_special
from engine.formats.tokenizer import Tokenizer
from engine.sampling import StructuredOutputs

from .call_forms import CallForms
from .errors import ApiError
from .fields import ChatBody, NamedTool, Tool
from .harmony_forms import any_with_calls, call_alone, call_or, calls_in_harmony
from .model import ServedModel
from .object_forms import call_object, call_object_or
from .section_forms import Section, SectionForms, section_of
from .tagged_forms import TaggedForms, Tags, tags_of


@dataclass(frozen=True)
class Wanted:
    """``form``: what the answer keeps to; ``tools``: those whose calls are looked for in it; ``one_call``: no more
    than one; ``plain``: the form is there from the beginning, with no reasoning before; ``tag``: what does not begin with
    it is no call."""

    form: StructuredOutputs | None
    tools: Tools
    one_call: bool
    plain: bool = True
    tag: str = ""


def tools_of(body: ChatBody) -> list[Tool]:
    """Those that the model is told of."""
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise ApiError(400, "tool_choice is given, and there are no tools.", "tool_choice")
    return [] if body.tool_choice == "none" else body.tools or []


def wanted(body: ChatBody, model: ServedModel) -> Wanted:
    """What the request wants of the answer. ApiError or RequestError where that cannot be."""
    tools, form, tokenizer = tools_of(body), body.form(), model.llm.engine.tokenizer
    names = {tool.function.name: tool.function.parameters or {} for tool in tools}
    one_call = body.parallel_tool_calls is False
    harmony = body.ending == "answer" and calls_in_harmony(tokenizer, tools)
    shown = tags_of(model.template()) or section_of(model.template())
    if body.tool_choice not in (None, "none", "auto"):
        if form is not None:
            raise ApiError(
                400, "A call of a tool is forced, and a form is asked for, too; leave one out.", "tool_choice"
            )
        chosen = _chosen(body.tool_choice, tools)
        if harmony:
            return Wanted(call_alone(chosen), names, one_call=True, plain=False)
        if shown is None:
            return Wanted(call_object(chosen), names, one_call=True)
        return Wanted(_forms(shown, tokenizer, chosen).alone(), names, one_call=True, tag=shown.mark)
    if form is None:
        return Wanted(_strict(tools, harmony, shown, tokenizer), names, one_call, plain=False)
    if not tools:
        return Wanted(form, names, one_call)
    if form.json is None and form.json_object is None:
        raise ApiError(
            400,
            "structured_outputs asks for a form in which no tool can be called; set tool_choice to none.",
            "structured_outputs",
        )
    if harmony:
        return Wanted(call_or(form, tools), names, one_call=True, plain=False)
    if shown is None:
        schema = {"type": "object"} if form.json is None else json.loads(str(form.json))
        return Wanted(call_object_or(schema, tools), names, one_call=True)
    return Wanted(_forms(shown, tokenizer, tools).or_text(form, one_call), names, one_call, tag=shown.mark)


def _chosen(choice: Any, tools: list[Tool]) -> list[Tool]:
    """The tools of which the model must call one."""
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise ApiError(400, f"tool_choice names {choice.function.name}, and there is no such tool.", "tool_choice")
    return tools


def _strict(
    tools: list[Tool], harmony: bool, shown: Tags | Section | None, tokenizer: Tokenizer
) -> StructuredOutputs | None:
    """The form of any text, in which calls are by the schemas of tools that are strict. None where none is, or neither calls nor
    thoughts can be told from a text."""
    if not any(tool.function.strict for tool in tools):
        return None
    held = [tool if tool.function.strict else _without_schema(tool) for tool in tools]
    if harmony:
        return any_with_calls(held)
    return None if shown is None or thoughts_are_special(tokenizer) else _forms(shown, tokenizer, held).any()


def _forms(shown: Tags | Section, tokenizer: Tokenizer, tools: list[Tool]) -> CallForms:
    """Those with calls as the template shows them."""
    if isinstance(shown, Tags):
        return TaggedForms(shown, tokenizer, tools)
    return SectionForms(shown, tokenizer, tools)


def _without_schema(tool: Tool) -> Tool:
    return tool.model_copy(update={"function": tool.function.model_copy(update={"parameters": None})})
