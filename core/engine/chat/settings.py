"""Settings of the chat, from the file, the environment and flags, checked by pydantic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from engine.console.options import EngineOptions, SamplingOptions
from engine.console.settings_file import fields_of, read_toml, told
from engine.console.texts import check_utf8
from engine.errors import UsageError

ENVIRONMENT = "ENGINE_"
_FILE = f"{ENVIRONMENT}CONFIG"
_LISTED = "engine chat --help and docs/configuration.md list them"


def config_file() -> Path:
    """Where the settings' file is; ENGINE_CONFIG names another."""
    named = os.environ.get(_FILE)
    return Path(named) if named else Path(platformdirs.user_config_dir("engine", appauthor=False)) / "config.toml"


def _default_database() -> Path:
    return Path(platformdirs.user_data_dir("engine", appauthor=False)) / "chats.db"


def history_file() -> Path:
    """Where the lines that were typed are kept."""
    return Path(platformdirs.user_state_dir("engine", appauthor=False)) / "chat_history"


class ToolSetting(BaseModel):
    """A tool that the model may ask for: a shell command, which gets its arguments as environment variables, or a
    Python function as ``module:name``."""

    model_config = ConfigDict(extra="forbid")

    description: str = Field("", description="What the tool does, for the model; a function's own docstring if empty.")
    command: str | None = Field(None, description="A command of the shell; its arguments are variables such as $city.")
    function: str | None = Field(None, description="A Python function, as module:name.")
    parameters: dict[str, str] = Field(
        default_factory=dict, description="Of a command: its arguments by name, each with what it means."
    )
    timeout: float = Field(60.0, gt=0, description="Seconds until it is stopped.")


class ChatSettings(BaseModel):
    """What only the chat knows."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    model: str | None = Field(None, description="The model where none is named.")
    attach: str | None = Field(None, description="Chat with the OpenAI-compatible server at this URL.")
    api_key: str | None = Field(None, description="The key that the server asks for; OPENAI_API_KEY if not given.")
    system: str | None = Field(None, description="The system message.")
    max_tokens: int | None = Field(
        None, ge=1, description="Most tokens of an answer; up to the context's end if not given."
    )
    think: Literal["show", "dim", "fold", "hide"] = Field("dim", description="How reasoning is displayed.")
    reasoning: bool | None = Field(None, description="Whether the model should reason, where its template knows that.")
    markdown: bool = Field(True, description="Render answers as Markdown on a terminal.")
    context_full: Literal["ask", "summarize", "drop", "stop"] = Field(
        "ask", description="What to do when the context is full; ask stops where nobody can be asked."
    )
    context_warning: float = Field(0.8, gt=0, le=1, description="Warn once this share of the context is used.")
    save: bool = Field(True, description="Keep conversations in the database.")
    database: Path = Field(default_factory=_default_database, description="Where conversations are kept.")
    editing: Literal["emacs", "vi"] = Field("emacs", description="Keys of the line editor.")
    tool_rounds: int = Field(8, ge=1, description="Most rounds of tool calls in one turn.")
    tools: dict[str, ToolSetting] = Field(default_factory=dict, description="Tools, a table [tools.NAME] each.")


SAMPLING = tuple(field.name for field in fields(SamplingOptions))
ENGINE = tuple(field.name for field in fields(EngineOptions))
Settings: Any = create_model(
    "Settings", __base__=ChatSettings, **fields_of(SamplingOptions), **fields_of(EngineOptions)
)
LIVE = (
    "system",
    "max_tokens",
    *SAMPLING,
    "think",
    "reasoning",
    "markdown",
    "context_full",
    "context_warning",
    "tool_rounds",
)
"""What /set changes in a running chat."""


def load_settings(flags: Mapping[str, Any]) -> Any:
    """The settings: flags before the environment, that before the file, that before defaults. Raises UsageError, or
    RequestError where no request could have them."""
    file = config_file()
    from_file, from_environment = _from_file(file), _from_environment()
    try:
        settings = Settings(**{**from_file, **from_environment, **flags})
    except ValidationError as error:
        name = str(next(iter(error.errors()[0]["loc"]), ""))
        variable = f"{ENVIRONMENT}{name.upper()}" if name in from_environment else None
        source = None if name in flags else variable or (file if name in from_file else None)
        raise UsageError(told(error, _LISTED) + (f" It comes from {source}." if source else "")) from error
    check_utf8(settings.system or "", "The system message")
    _check_sampling(settings)
    return settings


def _check_sampling(settings: Any) -> None:
    """Raises RequestError where a request of these settings would be refused."""
    SamplingOptions(**{name: getattr(settings, name) for name in SAMPLING}).params(max_tokens=settings.max_tokens)


def change(settings: Any, name: str, text: str) -> None:
    """Set one of LIVE from what a person typed. Raises UsageError, or RequestError where no request could have it."""
    if name not in LIVE:
        raise UsageError(f"There is no setting {name!r} to change here; there are {', '.join(LIVE)}.")
    value: Any = None if text.lower() in ("none", "") and _optional(name) else _typed(name, text)
    changed = settings.model_copy()
    try:
        setattr(changed, name, value)
    except ValidationError as error:
        raise UsageError(told(error, _LISTED)) from error
    _check_sampling(changed)
    setattr(settings, name, value)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except FileNotFoundError:
        if os.environ.get(_FILE):
            raise UsageError(
                f"{_FILE} is {path}, and there is no such file; name one that is there, or none."
            ) from None
        return {}


def _from_environment() -> dict[str, Any]:
    found = {}
    for name in Settings.model_fields:
        text = os.environ.get(ENVIRONMENT + name.upper())
        if text is not None and name != "tools":
            found[name] = _typed(name, text)
    return found


def _kinds(name: str) -> tuple[Any, ...]:
    annotation = Settings.model_fields[name].annotation
    return get_args(annotation) if get_origin(annotation) is not Literal else ()


def _optional(name: str) -> bool:
    return type(None) in _kinds(name)


def _typed(name: str, text: str) -> Any:
    """A list where the setting is one; pydantic makes numbers and truth values of texts."""
    return [text] if any(get_origin(kind) is list for kind in _kinds(name)) else text


def table() -> str:
    """All settings as a Markdown table."""
    lines = ["| setting | flag | environment | default | what it is |", "|---|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        what = f"{field.description}{_choices(name)}"
        lines.append(f"| `{name}` | {flag(name)} | {_variable(name)} | {_default(name)} | {what} |")
    return "\n".join(lines)


def tool_table() -> str:
    """The settings of a tool as a Markdown table."""
    rows = []
    for name, field in ToolSetting.model_fields.items():
        default = field.get_default(call_default_factory=True)
        rows.append(f"| `{name}` | {f'`{default:g}`' if default else ''} | {field.description} |")
    return "\n".join(["| setting | default | what it is |", "|---|---|---|", *rows])


def flag(name: str) -> str:
    """The flag of a setting, in backquotes; empty where it has none."""
    flags = {"model": "`MODEL`", "save": "`--no-save`", "markdown": "`--no-markdown`"}
    flags |= dict.fromkeys(("api_key", "context_warning", "editing", "tool_rounds", "tools"), "")
    return flags.get(name, f"`--{name.replace('_', '-')}`")


def _choices(name: str) -> str:
    annotation = Settings.model_fields[name].annotation
    return f" One of {', '.join(get_args(annotation))}." if get_origin(annotation) is Literal else ""


def _variable(name: str) -> str:
    return "" if name == "tools" else f"`{ENVIRONMENT}{name.upper()}`"


def _default(name: str) -> str:
    if name == "database":
        return "`chats.db` in the user's data folder"
    value = Settings.model_fields[name].get_default(call_default_factory=True)
    return "" if value is None or value == {} else f"`{str(value).lower() if isinstance(value, bool) else value}`"
