"""What form a request wants its text in, checked when it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import RequestError

MAX_TEXT = 128 << 10
"""Characters of a schema, an expression or a grammar."""
_MAX_KEYS = 1000  # of one object of a schema: the time to compile optional properties grows with their square
_JSON = "structured_outputs.json"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of the text, exactly one of (names and meanings are vLLM's):

    ``json``: a JSON schema, as text or as a mapping (between the parts of the JSON there is at most a space, or a line
    break with an indentation); ``regex``: an expression (of Rust's regex crate: no look-around, no
    back-references) that the whole text matches; ``choice``: texts, one of which it is; ``grammar``: a Lark grammar in
    llguidance's dialect, with the rule ``start``, or one in llama.cpp's GBNF, with the rule ``root``; ``json_object``:
    true for any JSON object.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {', '.join(given) or 'nothing'}; give exactly one of json, regex, choice, grammar "
                "and json_object.",
                "structured_outputs",
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise RequestError(
                    f"structured_outputs.{name} must be a text that is not empty.", f"structured_outputs.{name}"
                )
            if value is not None and len(value) > MAX_TEXT:
                raise RequestError(
                    f"structured_outputs.{name} has {len(value)} characters; at most {MAX_TEXT} are taken.",
                    f"structured_outputs.{name}",
                )
        if self.json_object is not None and self.json_object is not True:
            raise RequestError(
                "structured_outputs.json_object must be true, or be left out.", "structured_outputs.json_object"
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))

    @property
    def field(self) -> str:
        """Which of them it is, as requests name it."""
        return "structured_outputs." + next(each.name for each in fields(self) if getattr(self, each.name) is not None)


def _choices(value: Any) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()
    if not texts or any(not isinstance(text, str) or not text for text in texts):
        raise RequestError(
            "structured_outputs.choice must be a list of texts, none of them empty.", "structured_outputs.choice"
        )
    if sum(map(len, texts)) > MAX_TEXT:
        raise RequestError(
            f"structured_outputs.choice has more than {MAX_TEXT} characters.", "structured_outputs.choice"
        )
    return texts


def _schema(value: Any) -> str:
    """The schema as JSON text, its keys in the order given: that is the order of the properties in the output."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is no JSON schema: {error}.", _JSON) from error
    if not isinstance(schema, Mapping):
        raise RequestError("structured_outputs.json must be a JSON schema: an object, or the text of one.", _JSON)
    if len(text) > MAX_TEXT:
        raise RequestError(f"structured_outputs.json has {len(text)} characters; at most {MAX_TEXT} are taken.", _JSON)
    if (most := max(_sizes(schema))) > _MAX_KEYS:
        raise RequestError(
            f"structured_outputs.json has an object of {most} keys; at most {_MAX_KEYS} are taken.", _JSON
        )
    return text


def _sizes(value: Any) -> list[int]:
    """How many keys each object has."""
    sizes, left = [0], [value]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            sizes.append(len(node))
            left += node.values()
        elif isinstance(node, list):
            left += node
    return sizes
