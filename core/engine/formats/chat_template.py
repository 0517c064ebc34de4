"""Chat templates: Jinja in a sandbox, in the environment that the templates of Hugging Face are written for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine.errors import TemplateError

if TYPE_CHECKING:
    from jinja2 import Template

_MAX_SOURCE = 1 << 20  # characters
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What conversations call an answer's reasoning; gpt-oss's template reads the second, most others the first."""
_CHANNEL = "<|channel|>"  # of gpt-oss's messages


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the texts of the model's special tokens by the names that templates have for them (bos_token, ...);
    tool_source replaces source if tools are given."""

    source: str
    marks: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, to be tokenized with parse_special and without add_special.

        variables: what else the template knows (enable_thinking, ...).  TemplateError if the template is invalid,
        refuses the messages, or uses far more memory or time than a prompt of them needs.
        """
        source = self.tool_source if tools and self.tool_source else self.source
        values = {
            "messages": [_templated(message, _CHANNEL in source) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _rendered(_compile(source), {**self.marks, **values, **variables})

    def reads(self, name: str) -> bool:
        """Whether the template looks at a variable of this name. TemplateError if the template is invalid."""
        sources = (self.source, self.tool_source or "")
        return any(name in _variables(source) for source in sources)


def _templated(message: Mapping[str, Any], in_channels: bool) -> Mapping[str, Any]:
    """As transformers gives a message to a template: without keys that are null, which many would write as None or run
    through, and with its reasoning under both names that templates read."""
    said = {key: value for key, value in message.items() if value is not None}
    thoughts = next((said[name] for name in _THOUGHTS if name in said), None)
    if thoughts is None:
        return said
    if in_channels and said.get("tool_calls") and thoughts and said.get("content"):
        # gpt-oss's template refuses both beside calls, and shows either as analysis
        thoughts = said["thinking"] = f"{thoughts}\n\n{said['content']}"
        said["content"] = ""
    return {"thinking": thoughts, **said, "reasoning_content": thoughts}


def _rendered(template: Template, values: dict[str, Any]) -> str:
    from engine.formats.template_sandbox import METER, Meter

    try:
        return template.render({**values, METER: Meter(values)})
    except Exception as error:  # a template can raise anything that Python can
        raise TemplateError(f"The chat template refuses these messages: {_sentence(error)}.") from error


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")


@lru_cache(maxsize=16)
def _variables(source: str) -> frozenset[str]:
    from jinja2 import meta

    from engine.formats.template_sandbox import environment

    _compile(source)
    return frozenset(meta.find_undeclared_variables(environment().parse(source)))


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    if len(source) > _MAX_SOURCE:
        raise TemplateError(f"the chat template has {len(source)} characters, where {_MAX_SOURCE} are the most.")
    try:
        from engine.formats.template_sandbox import environment

        return environment().from_string(source)
    except Exception as error:  # Jinja raises its own errors, Python's compiler others
        raise TemplateError(f"the chat template is not valid: {_sentence(error)}.") from error
