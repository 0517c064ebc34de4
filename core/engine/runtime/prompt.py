"""What a caller may give as a prompt: a text, token ids, or either in a mapping, in the field's forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from numbers import Integral
from typing import Any, TypedDict, TypeVar

from ..errors import EngineError, RequestError

R = TypeVar("R")

_FORMS = "a text, a sequence of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


class TextPrompt(TypedDict):
    """A text, to be encoded by the model's tokenizer."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, taken as they are."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


def plain(prompt: Prompt) -> str | tuple[int, ...]:
    """The prompt as a text or as ids. Raises RequestError for anything else."""
    content: Any = prompt
    if isinstance(prompt, Mapping):
        content = _content(prompt)
    if isinstance(content, str):
        return content
    if not isinstance(content, Iterable) or isinstance(content, bytes | Mapping):
        raise RequestError(f"A prompt of type {type(content).__name__} is not known; give {_FORMS}.")
    ids = tuple(i if type(i) is int else _integer(i) for i in content)
    wrong = [i for i in ids if not isinstance(i, Integral) or isinstance(i, bool)]
    if wrong:
        raise RequestError(f"The prompt has {wrong[0]!r} in the place of a token id; give {_FORMS}.")
    return tuple(int(i) for i in ids)


def _content(prompt: Mapping[str, Any]) -> Any:
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"} and not isinstance(prompt["prompt_token_ids"], str):
        return prompt["prompt_token_ids"]
    keys = ", ".join(map(repr, prompt)) or "no keys"
    raise RequestError(f"A prompt with {keys} is not known; give {_FORMS}.")


def _integer(item: Any) -> Any:
    """An array of one integer, such as torch's tensors have as elements, as that; all else as it is."""
    whole = getattr(item, "ndim", None) == 0 and hasattr(item, "__index__")
    try:
        return item.__index__() if whole and not isinstance(item, Integral) else item
    except TypeError:
        return item


def listed(prompts: Prompt | Sequence[Prompt]) -> list[str | tuple[int, ...]]:
    """One prompt, or a sequence of them, each as a text or ids. Integers in a sequence make it one prompt."""
    if isinstance(prompts, str | Mapping):
        return [plain(prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes) or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(f"A prompt of type {type(prompts).__name__} is not known; give {_FORMS}.")
    items: list[Any] = list(prompts)
    one = items and isinstance(_integer(items[0]), Integral)
    return [plain(items)] if one else of_each(plain, items)


def of_each(make: Callable[..., R], *prompts: Sequence[Any]) -> list[R]:
    """What ``make`` gives for each of several prompts; an EngineError of its says of which."""
    made: list[R] = []
    for given in zip(*prompts, strict=True):
        try:
            made.append(make(*given))
        except EngineError as error:
            raise numbered(error, len(made), len(prompts[0])) from error
    return made


def numbered(error: EngineError, index: int, count: int) -> EngineError:
    """The error of one of several prompts, which says of which."""
    if count == 1:
        return error
    telling = copy(error)  # with what else it says
    telling.args = (f"Prompt {index + 1} of {count}: {error}",)
    return telling
