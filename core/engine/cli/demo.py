"""The built-in demo model, where a command is given no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine import demo
from engine.cli.running import note

OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, or a folder with config.json and safetensors; the built-in demo model if not given.",
    ),
]


def model_or_demo(model: str | None) -> Path:
    """The model's path; the demo's, with a line that says so, where there is none."""
    if model is not None:
        return Path(model)
    note("No model is given, so this is the small built-in demo; engine pull OWNER/REPO gets a real one.")
    return demo.MODEL


def model_and_text(given: str | None, text: str | None) -> tuple[str | None, str | None]:
    """MODEL and TEXT of a command whose MODEL may be left out: one argument alone is the text, unless it is a model."""
    if given is None or text is not None or _is_model(given):
        return given, text
    return None, given


def _is_model(given: str) -> bool:
    if given.lower().endswith(".gguf"):
        return True
    try:
        return Path(given).exists()
    except (OSError, ValueError):  # a long text is no file name
        return False
