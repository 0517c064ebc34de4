"""A file of models that one server has, each with settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from engine.console.options import EngineOptions
from engine.console.settings_file import fields_of, read_toml, told
from engine.errors import UsageError
from engine.hub.locate import path_exists

from .settings import LoadOptions


@dataclass(frozen=True)
class Named:
    """A model by the name that requests have for it; ``model``: a path, or a name on the hub."""

    name: str
    model: str
    engine: EngineOptions
    load: LoadOptions


_Entry: Any = create_model(
    "_Entry",
    __config__=ConfigDict(extra="forbid"),
    model=(str, ...),
    **fields_of(EngineOptions),
    **fields_of(LoadOptions),
)
_FILE: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, _Entry])


def read_models(path: Path, engine: EngineOptions, load: LoadOptions) -> list[Named]:
    """The models of a TOML file, in its order: a table for each, with ``model`` and those options that are not as the command
    line has them. A path counts from the file's folder. UsageError where the file is not so."""
    try:
        entries = _FILE.validate_python(read_toml(path))
    except FileNotFoundError as error:
        raise UsageError(f"There is no file {path}.") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {told(error, 'docs/serve.md says what a model may have')}") from error
    if not entries:
        raise UsageError(f"{path} has no models; each is a table, such as [small], with at least model = ...")
    return [_named(path, name, entry.model_dump(exclude_unset=True), engine, load) for name, entry in entries.items()]


def _named(path: Path, name: str, own: Mapping[str, Any], engine: EngineOptions, load: LoadOptions) -> Named:
    here = str(path.parent / own["model"])
    model = here if path_exists(here) else own["model"]
    return Named(name, model, replace(engine, **_of(engine, own)), replace(load, **_of(load, own)))


def _of(options: EngineOptions | LoadOptions, own: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: own[field.name] for field in fields(options) if field.name in own}
