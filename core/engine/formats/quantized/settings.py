"""quantization_config of config.json, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import FormatError


class Settings(BaseModel):
    """Keys that no field names are of no account for the stored numbers, and are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


S = TypeVar("S", bound=Settings)


def parse(kind: type[S], data: Mapping[str, Any]) -> S:
    """The settings; FormatError names the first key that is wrong, and what is allowed."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "its keys"
        raise FormatError(f"quantization_config is not supported: {key}: {first['msg']}.") from error
