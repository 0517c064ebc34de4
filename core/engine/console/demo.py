"""The built-in demo model, where a command is given no model."""

from __future__ import annotations

from typing import Annotated

import typer

from engine import demo
from engine.console.notes import note
from engine.console.options import MODEL_HELP

OptionalModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}; the built-in demo model if not given."),
]


def model_or_demo(model: str | None) -> str:
    """The model's name; the demo's path, with a line that says so, where there is none."""
    if model is not None:
        return model
    note("No model is given, so this is the small built-in demo; engine pull OWNER/REPO gets a real one.")
    return str(demo.MODEL)


def model_and_text(given: str | None, text: str | None) -> tuple[str | None, str | None]:
    """MODEL and TEXT of a command whose MODEL may be left out: one argument alone is the text, unless it is a model."""
    if given is None or text is not None or _is_model(given):
        return given, text
    return None, given


def _is_model(given: str) -> bool:
    from engine.hub.locate import path_exists
    from engine.hub.names import parse_name

    return given.lower().endswith(".gguf") or parse_name(given) is not None or path_exists(given)
