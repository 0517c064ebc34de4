"""What an answer may be where there are tools: a call, a text of the form that is asked for, or any text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine.answers import TAG, Tools
from engine.formats.chat_template import ChatTemplate
from engine.sampling import StructuredOutputs
from engine.sampling.grammar import json_in_lark

from .errors import ApiError
from .fields import ChatBody, NamedTool, Tool
from .harmony_forms import any_with_calls, call_alone, call_or, calls_in_harmony
from .model import ServedModel


@dataclass(frozen=True)
class Wanted:
    """``form``: what the answer keeps to; ``tools``: those whose calls are looked for in it; ``one_call``: no more
    than one; ``plain``: the form is there from the beginning, with no reasoning before; ``tagged``: what does not begin with
    the tag of a call is none."""

    form: StructuredOutputs | None
    tools: Tools
    one_call: bool
    plain: bool = True
    tagged: bool = False


def tools_of(body: ChatBody) -> list[Tool]:
    """Those that the model is told of."""
    if body.tool_choice is not None and body.tool_choice != "none" and not body.tools:
        raise ApiError(400, "tool_choice is given, and there are no tools.", "tool_choice")
    return [] if body.tool_choice == "none" else body.tools or []


def wanted(body: ChatBody, model: ServedModel) -> Wanted:
    """What the request wants of the answer. ApiError or RequestError where that cannot be."""
    tools, form = tools_of(body), body.form()
    names = {tool.function.name: tool.function.parameters or {} for tool in tools}
    one_call = body.parallel_tool_calls is False
    harmony = body.ending == "answer" and calls_in_harmony(model.llm.engine.tokenizer, tools)
    if body.tool_choice not in (None, "none", "auto"):
        if form is not None:
            raise ApiError(
                400, "A call of a tool is forced, and a form is asked for, too; leave one out.", "tool_choice"
            )
        chosen = _chosen(body.tool_choice, tools)
        if harmony:
            return Wanted(call_alone(chosen), names, one_call=True, plain=False)
        return Wanted(_call_form(chosen), names, one_call=True)
    if form is None:
        return Wanted(_strict(tools, harmony, model), names, one_call, plain=False)
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
    if _writes_tags(model.template()):
        return Wanted(_tagged_call_or(form, tools, one_call), names, one_call, tagged=True)
    return Wanted(_call_or(form, tools), names, one_call=True)


def _chosen(choice: Any, tools: list[Tool]) -> list[Tool]:
    """The tools of which the model must call one."""
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise ApiError(400, f"tool_choice names {choice.function.name}, and there is no such tool.", "tool_choice")
    return tools


def _strict(tools: list[Tool], harmony: bool, model: ServedModel) -> StructuredOutputs | None:
    """The form of any text, in which calls are by the schemas of tools that are strict. None where none is, or calls cannot be
    told from a text."""
    if not any(tool.function.strict for tool in tools):
        return None
    held = [tool if tool.function.strict else _without_schema(tool) for tool in tools]
    if harmony:
        return any_with_calls(held)
    return _text_with_calls(held) if _writes_tags(model.template()) else None


def _writes_tags(template: ChatTemplate) -> bool:
    return TAG in (template.tool_source or template.source)


def _text_with_calls(tools: list[Tool]) -> StructuredOutputs:
    """The form of any text, in which calls are by the tools' schemas."""
    rules = [
        "%llguidance {}",
        r'start: (begin "\n"? object "\n"? "</tool_call>")* TEXT',
        f'begin[lazy]: TEXT "{TAG}"',
        f"object: {json_in_lark(_call_form(tools))}",
        r"TEXT: /(.|\n)*/",
    ]
    return StructuredOutputs(grammar="\n".join(rules))


def _without_schema(tool: Tool) -> Tool:
    return tool.model_copy(update={"function": tool.function.model_copy(update={"parameters": None})})


def _tagged_call_or(form: StructuredOutputs, tools: list[Tool], one_call: bool) -> StructuredOutputs:
    """The form of calls as the template shows them to the model, or of a text in its own: the first token decides."""
    rules = [
        "%llguidance {}",
        "start: text | call" if one_call else r'start: text | call ("\n" call)*',
        f"text: {json_in_lark(form)}",
        rf'call: "{TAG}" "\n"? object "\n"? "</tool_call>"',
        f"object: {json_in_lark(_call_form(tools))}",
    ]
    return StructuredOutputs(grammar="\n".join(rules))


def _call_or(form: StructuredOutputs, tools: list[Tool]) -> StructuredOutputs:
    """The form of a call, or of a text in its own."""
    schema = {"type": "object"} if form.json is None else json.loads(str(form.json))
    return StructuredOutputs(json={"anyOf": [*_call_schemas(tools), _part(schema, "form")]})


def _call_form(tools: list[Tool]) -> StructuredOutputs:
    return StructuredOutputs(json={"anyOf": _call_schemas(tools)})


def _call_schemas(tools: list[Tool]) -> list[dict[str, Any]]:
    return [_call_schema(tool, place) for place, tool in enumerate(tools)]


def _call_schema(tool: Tool, place: int) -> dict[str, Any]:
    arguments = _part(tool.function.parameters or {"type": "object"}, f"tool:{place}")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _part(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema that has become a part of another: by an id of its own, its references begin where it does. A draft that it
    names would have it be a whole of its own."""
    return {**{key: value for key, value in schema.items() if key != "$schema"}, "$id": name}
