"""A model that a person named, opened: downloaded where it is not here, loaded with a bar, and listed while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .notes import note
from .processes import shown
from .progress import Wait

if TYPE_CHECKING:
    from engine import LLM
    from engine.runtime.load import Loaded


def find_model(model: str) -> Path:
    """The model's path; what is named and not here is downloaded. Raises HubError."""
    from engine.hub import located

    with Wait("Downloading") as wait:
        return located(model, wait.update, note)


def open_loaded(model: str, settings: dict[str, Any]) -> Loaded:
    """The model, loaded and not run, with keywords of ``EngineConfig``."""
    path = find_model(model)
    with Wait("Loading") as wait:
        from engine.runtime.config import EngineConfig
        from engine.runtime.load import load

        return load(EngineConfig(model=path, **settings), wait.update)


@contextmanager
def open_llm(model: str, settings: dict[str, Any]) -> Iterator[LLM]:
    """The model, loaded with keywords of ``LLM``, and shown by ``engine ps``; closed at the end."""
    path = find_model(model)
    with Wait("Loading") as wait:
        from engine import LLM

        llm = LLM(path, progress=wait.update, **settings)
    with llm, shown(llm.loaded):
        yield llm
