"""What requests may say: pydantic models that refuse whatever they do not know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from engine.errors import RequestError
from engine.sampling import SamplingParams, StructuredOutputs

from .errors import ApiError

MAX_LISTED = 1024  # prompts, or stop strings, of a request
_MAX_FIELDS = 1024  # of an object
_MAX_ITEMS = 16384  # of a list, such as the messages of a conversation
_MAX_DEPTH = 128  # of an object of the caller's: what is done with schemas goes down with them


class _FirstFault:
    """A list is checked up to its first fault: a body has room for millions, and nobody else is answered while they are
    written down."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


T = TypeVar("T")
Many = Annotated[list[T], _FirstFault()]
"""As many as a body holds."""
Listed = Annotated[list[T], _FirstFault(), Field(max_length=_MAX_ITEMS)]


def _few(given: Any) -> Any:
    """For the same reason: each field may be a fault of its own."""
    if isinstance(given, dict) and len(given) > _MAX_FIELDS:
        raise PydanticCustomError("too_many", f"it has {len(given)} fields, and at most {_MAX_FIELDS} are taken")
    return given


Few = Annotated[dict[str, T], BeforeValidator(_few)]


def _usable(given: dict[str, Any]) -> dict[str, Any]:
    left: list[tuple[Any, int]] = [(given, 1)]
    while left:
        part, depth = left.pop()
        if isinstance(part, float) and not isfinite(part):
            raise PydanticCustomError("finite_number", "it has a number that is not finite")
        if isinstance(part, (dict, list)):
            if depth > _MAX_DEPTH:
                raise PydanticCustomError("too_deep", f"it is nested deeper than {_MAX_DEPTH} levels")
            left += ((one, depth + 1) for one in (part.values() if isinstance(part, dict) else part))
    return given


Loose = Annotated[dict[str, Any], AfterValidator(_usable)]
"""An object of the caller's, such as a schema; its numbers are finite, as JSON's are, and it is not too deep."""


class Body(BaseModel):
    """Types are not bent, numbers are finite, and fields that are not known are refused, unless they are null: clients send
    answers back as they hold them, with all that was not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        given = _few(given)
        if not isinstance(given, dict) or all(value is not None for value in given.values()):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in given.items() if value is not None or name in known}


class AskedOfOllama(Body):
    """In Ollama's protocol a null is what is not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""What clients send where nothing is given."""


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    """OpenAI's; ``strict`` or not, the answer is valid by the schema."""

    name: str
    description: str | None = None
    schema_: Loose | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonFormat(Body):
    type: Literal["json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class Form(Body):
    """vLLM's ``structured_outputs``: exactly one of these."""

    json_: Loose | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(Body):
    """What chat and plain completions have in common. Of the last ones some name the caller's own things, and the others are
    taken where they say what is so anyway."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Few[float] | None = None
    seed: int | None = None
    stop: str | Annotated[Many[str], Field(max_length=MAX_LISTED)] | None = None
    stop_token_ids: Listed[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Form | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: Few[str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    def sampling(self, usual: Mapping[str, float | None], **others: Any) -> SamplingParams:
        """As sampling parameters, with ``others`` over them and below them what is ``usual``, such as the model's makers
        recommend it. RequestError where one is out of range."""
        own = {name: getattr(self, name) for name in _SAMPLING}
        said = {name: value for name, value in (own | others).items() if value is not None}
        given = {**usual, **said}
        if self.seed is not None and -(1 << 63) <= self.seed < 0:  # OpenAI's seeds are signed
            given["seed"] = self.seed + (1 << 64)
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias)
        if (form := self.form()) is not None:
            given.setdefault("structured_outputs", form)
        return SamplingParams(**given)

    def form(self) -> StructuredOutputs | None:
        """The form that the answer must have."""
        wanted = self.response_format
        if self.structured_outputs is not None:
            if wanted is not None and wanted.type != "text":
                raise RequestError(
                    "structured_outputs and response_format both give a form; leave one out.", "structured_outputs"
                )
            given = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            return StructuredOutputs(**given)
        if isinstance(wanted, SchemaFormat) and wanted.json_schema.schema_ is not None:
            return StructuredOutputs(json=wanted.json_schema.schema_)
        return None if wanted is None or wanted.type == "text" else StructuredOutputs(json_object=True)

    @property
    def names(self) -> dict[str, str | None]:
        """What the request calls fields of the parameters that are made of it."""
        given = self.structured_outputs is None and self.response_format is not None
        return dict.fromkeys(FORMS, "response_format") if given else {}

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams; set stream to true, or leave it out.", "stream_options")
        return bool(self.stream_options and self.stream_options.include_usage)


FORMS = ("structured_outputs.json", "structured_outputs.json_object", "structured_outputs.grammar")
"""Those that are made of what has another name."""
_SAMPLING = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "no_repeat_ngram_size",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def _biases(given: dict[str, float]) -> dict[int, float]:
    wrong = next((token for token in given if not (token.isascii() and token.isdigit() and len(token) < 10)), None)
    if wrong is not None:
        raise RequestError(f"logit_bias has the key {wrong!r}; its keys must be token ids.", "logit_bias")
    return {int(token): bias for token, bias in given.items()}


class FunctionCall(Body):
    name: str
    arguments: str


class CallOfMessage(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation. What OpenAI's answers have beside it is taken where it is null or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Listed[TextPart] | None = None
    name: str | None = None
    tool_calls: Listed[CallOfMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None

    def templated(self) -> dict[str, Any]:
        """As chat templates want it: the content one text, and the arguments of tool calls as what they say."""
        if self.content is None and not self.tool_calls:
            raise ApiError(400, f"A message of the role {self.role} has no content.", "messages")
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id or "", "type": "function", "function": _parsed(call.function)}
                for call in self.tool_calls
            ]
        return message


def _parsed(call: FunctionCall) -> dict[str, Any]:
    """What is no JSON stays a text, as does what JSON says and no template can: an answer comes back as it was given."""
    try:
        arguments = json.loads(call.arguments or "{}", parse_constant=_not_a_number)
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # 1e999, and half of a surrogate pair
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"name": call.name, "arguments": arguments}


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON.")


class Function(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Loose | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How long a model may think, by OpenAI's names."""


Ending = Literal["answer", "none", "continued"]
"""What follows a conversation in its prompt: where an answer begins, or nothing, or nothing within its last message."""


def ending_of(add_generation_prompt: bool | None, continue_final_message: bool | None) -> Ending:
    """By vLLM's two fields. ApiError 400 where both are true."""
    if continue_final_message:
        if add_generation_prompt:
            raise ApiError(
                400,
                "add_generation_prompt begins an answer, and continue_final_message goes on with one; set one to false.",
                "continue_final_message",
            )
        return "continued"
    return "none" if add_generation_prompt is False else "answer"


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Listed[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    modalities: Listed[Literal["text"]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Loose | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def names(self) -> dict[str, str | None]:
        found = super().names | {"prompt": "messages"}
        if self.tools and self.tool_choice != "none":
            text = self.response_format is None or self.response_format.type == "text"
            found |= dict.fromkeys(FORMS, "tools" if text and self.structured_outputs is None else None)
        if self.max_completion_tokens is not None:
            found["max_tokens"] = "max_completion_tokens"
        if self.top_logprobs is not None:
            found["logprobs"] = "top_logprobs"
        return found

    @property
    def ending(self) -> Ending:
        return ending_of(self.add_generation_prompt, self.continue_final_message)

    def templated(self) -> list[dict[str, Any]]:
        return [message.templated() for message in self.messages]


Prompts = str | Many[str] | Many[int] | Many[Many[int]]


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeBody(Body):
    """POST /tokenize: a text, with the special tokens around it unless it is to be without, or a conversation, whose template
    makes all of it unless they are asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[Message] | None = None
    tools: Listed[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Loose | None = None


class ContextOption(AskedOfOllama):
    """Ollama's ``num_ctx``."""

    num_ctx: int | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Many[int]
