"""Settings in TOML files, checked by pydantic: options of commands under their own names, with underscores."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import Field, ValidationError

from engine.console.texts import read_text
from engine.errors import UsageError


def fields_of(group: Any) -> dict[str, Any]:
    """Fields of a pydantic model like those of a dataclass of options, for ``pydantic.create_model``."""
    hints = get_type_hints(group, include_extras=True)
    found = {}
    for field in fields(group):
        kind, option = get_args(hints[field.name])
        found[field.name] = (kind, Field(field.default, description=option.help))
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. UsageError where it is no TOML or cannot be read; FileNotFoundError where there is none."""
    try:
        with path.open("rb") as file:
            return tomllib.loads(read_text(file, str(path)))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is no TOML file: {error}.") from error


def told(error: ValidationError, listed: str) -> str:
    """The first of a validation's complaints as a sentence; ``listed`` says where settings are listed."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"There is no setting {where}; {listed}."
    if first["type"] == "missing":
        return f"The setting {where} is missing; {listed}."
    if first["type"] == "model_type":
        return f"{where} is {first['input']!r}; it must be a table."
    return f"The setting {where} is {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}."
