"""What POST /v1/responses may say, and the chat that it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, model_validator
from pydantic import Tag as Named

from .fields import Body, ChatBody, Effort, Few, Listed, Loose, Nothing


class Part(Body):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _joined(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Said(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Listed[Part]
    id: str | None = None
    status: str | None = None

    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": _joined(self.content)}


class Called(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None

    def message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class Result(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Listed[Part]
    id: str | None = None
    status: str | None = None

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}


class ThoughtPart(Body):
    type: Literal["reasoning_text"]
    text: str


class Thought(Body):
    """Part of the message that follows; what the chat template shows to the model again is its own affair."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: Listed[ThoughtPart] | None = None
    status: str | None = None


def _kind(item: Any) -> Any:
    """Messages may leave their type out."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[Said, Named("message")]
    | Annotated[Called, Named("function_call")]
    | Annotated[Result, Named("function_call_output")]
    | Annotated[Thought, Named("reasoning")],
    Discriminator(_kind),
]


class TextFormat(Body):
    """As in a chat's ``response_format``, but flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Loose | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> TextFormat:
        if self.type == "json_schema" and self.name is None:  # the answer, which shows the form, must have one
            self.name = "answer"
        return self


class TextOptions(Body):
    format: TextFormat | None = None


class ToolOfResponses(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Loose | None = None
    strict: bool | None = None


class NamedChoice(Body):
    type: Literal["function"]
    name: str


class Reasoning(Body):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class StreamForm(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """POST /v1/responses. Nothing is stored, so there is no earlier response to go on from. Of the last ones some name the
    caller's own things, and the others are taken where they say what is so anyway."""

    input: str | Listed[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: Listed[ToolOfResponses] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    metadata: Few[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Nothing = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    top_logprobs: Literal[0] | None = None
    stream_options: StreamForm | None = None
    service_tier: Literal["auto", "default"] | None = None

    def chat(self) -> ChatBody:
        """The same as a chat. ValidationError where that cannot be."""
        names = ("model", "stream", "temperature", "top_p", "parallel_tool_calls")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields |= {"messages": list(self._messages()), "max_tokens": self.max_output_tokens}
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        choice = self.tool_choice
        named = isinstance(choice, NamedChoice)
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice  # type: ignore[union-attr]
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _format(self.text.format)
        return ChatBody(**fields)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Calls that follow each other, or an answer, are one message."""
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        items = [Said(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        last: dict[str, Any] | None = None
        thoughts = ""
        for item in items:
            if isinstance(item, Thought):
                thoughts += "".join(part.text for part in item.content or ())
                continue
            message = item.message()
            if last is not None and "tool_calls" in message and last["role"] == "assistant" and not thoughts:
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
                continue
            if thoughts and message["role"] == "assistant":
                message["reasoning_content"] = thoughts
            thoughts = ""
            if last is not None:
                yield last
            last = message
        if last is not None:
            yield last


NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What a request calls the chat's fields."""


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}
