"""From what a person calls a model to its path."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HubError, UsageError
from .names import HubName, parse_name

if TYPE_CHECKING:
    from .download import Progress

Say = Callable[[str], None]
"""Takes a sentence for the person."""


def located(model: str | Path, progress: Progress | None = None, say: Say | None = None) -> Path:
    """The model's path: a file or folder that there is, else a name's model from the cache, else from the hub.

    What is neither stays a path, for whoever opens it to refuse. Raises HubError.
    """
    name = _name(model)
    if name is None:
        return Path(model)
    from .cache import find
    from .remote import UnreachableError

    try:
        return find(name) or pull(name, progress, say).path
    except UnreachableError as error:  # who mistyped a path learns that it was taken for a name
        raise HubError(f"There is no file or folder {model}, nor is it in the cache. {error}") from error


def located_here(model: str) -> Path:
    """The model's path as ``located`` finds it, without the hub. Raises HubError for a name that is not in the cache."""
    name = _name(model)
    if name is None:
        return Path(model)
    from .cache import find

    found = find(name)
    if found is None:
        raise HubError(f"{model} is not here, and nothing is downloaded to show it; engine pull {model} gets it.")
    return found


def _name(model: str | Path) -> HubName | None:
    if not isinstance(model, str | Path):
        raise UsageError(f"A model is a path or a name on the hub, and not {model!r}.")
    text = os.fspath(model)
    if not text:
        raise UsageError("The model's name is empty; give a path, or a name on the hub.")
    return None if path_exists(text) else parse_name(text)


def path_exists(text: str) -> bool:
    """Whether a text is the path of something that there is."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # a long text is no file name
        return False


@dataclass(frozen=True)
class Pulled:
    """A model that has come from the hub: its path, and its whole name."""

    path: Path
    name: HubName


def pull(name: HubName, progress: Progress | None = None, say: Say | None = None, free: int | None = None) -> Pulled:
    """Downloads a model. Without a type, the best that ``free`` bytes of memory hold (the machine's if None) is taken, and
    ``say`` hears which and why. Raises HubError."""
    from ..backend.host import available_memory  # a model that is here, and a start, need none of these
    from .download import download, holds
    from .remote import look_up
    from .variants import Choice, choose, named, size, variants

    repository = look_up(name)
    found = variants(repository.files)
    if not found:
        raise HubError(
            f"{name.repo} has no model that engine reads: neither a GGUF file nor config.json with safetensors."
        )
    wanted = name.file or name.variant
    if wanted is None:
        choice = choose(found, name.repo, available_memory().free if free is None else free)
    else:
        variant = named(found, wanted, name.repo)
        choice = Choice(variant, f"{variant.label}, {size(variant.size)}")
    if say is not None:
        here = holds(repository, choice.variant)
        say(f"{name.repo} is here already: {choice.why}." if here else f"Downloading {name.repo}, {choice.why}.")
    path = download(repository, choice.variant, progress)
    return Pulled(path, HubName(name.repo, choice.variant.label))
