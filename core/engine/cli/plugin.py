"""``engine plugin new NAME``: a starter project of a backend, which passes the conformance kit as it is."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import UsageError

plugin = typer.Typer(help="Begin a backend of your own.", rich_markup_mode=None)

_NAME = re.compile(r"[a-z]([a-z0-9_]{0,29}[a-z0-9])?")
_EXAMPLE = "mydev"  # what the starter's files say where the name goes
# file of the starter -> where it goes
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "__init__.py": "engine_mydev/__init__.py",
    "device.py": "engine_mydev/device.py",
    "providers.py": "engine_mydev/providers.py",
    "test_backend.py": "tests/test_mydev.py",
    "ci.yml": ".github/workflows/ci.yml",
}


@plugin.callback()
def root() -> None:
    """Begin a backend of your own."""


@plugin.command()
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The backend's name: small letters, digits, underscores.")
    ],
    folder: Annotated[Path | None, typer.Option(help="Where to write it; engine-NAME if not given.")] = None,
) -> None:
    """Write a starter project: package, tests and CI of a backend that runs every model at once, slowly.

    docs/write-a-backend.md leads from there to a fast one.
    """
    where = folder or Path(f"engine-{name}")
    for path in write_project(name, where):
        print(where / path)


def write_project(name: str, folder: Path) -> list[str]:
    """Writes the project into a folder that is new or empty; the paths written, within it. UsageError if the name or the
    folder will not do, or cannot be written to."""
    from engine.backend.registry import discover

    if not _NAME.fullmatch(name):
        raise UsageError(
            f'A backend cannot be called "{name}"; take small letters, digits and underscores, a letter first.'
        )
    if name == "auto" or name in {backend.name for backend in discover()}:
        raise UsageError(f"There is a backend {name} already; take another name.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already, and is no empty folder; name another by --folder.")
    there = folder.exists()
    try:
        return [_write(folder, source, place, name) for source, place in _FILES.items()]
    except UsageError:  # half of it would be in the way of the next try
        for part in [*folder.iterdir()] if folder.is_dir() else ():
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        if not there and folder.is_dir():
            folder.rmdir()
        raise


def _write(folder: Path, source: str, place: str, name: str) -> str:
    path = place.replace(_EXAMPLE, name)
    target = folder / path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(starter(source, name))
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}.") from error
    return path


def starter(file: str, name: str) -> str:
    """The text of a file of the starter project, for a backend of this name."""
    text = files("engine.cli").joinpath("starter", f"{file}.txt").read_text()
    return text.replace(_EXAMPLE, name)
