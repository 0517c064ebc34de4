"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from engine.errors import UsageError
from engine.hub.variants import BELOW, BESIDE


def check_target(out: Path, source: Path, size: int, force: bool, is_folder: bool = False) -> None:
    """UsageError if a result of ``size`` bytes, a file or a folder, may not or cannot go to ``out``."""
    folder = out.parent
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder, so that {out.name} cannot be written there.")
    if out.exists() and source.exists() and out.samefile(source):
        raise UsageError(f"{out} is the input; give another name for the output.")
    if out.is_dir() and not is_folder:
        raise UsageError(f"{out} is a folder; give the name of a file in it.")
    if out.exists() and not (out.is_file() or out.is_dir()):
        raise UsageError(f"{out} is a device or a pipe, and is not replaced; give the name of a file.")
    if out.exists() and not force:
        raise UsageError(f"{out} exists; give another name, or --force to replace it.")
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UsageError(f"The output takes {size / 1e6:,.1f} MB, but {folder} has {free / 1e6:,.1f} MB left.")
    try:  # now, and not after what takes hours
        with suppress(FileNotFoundError):  # unless the name is one that there cannot be
            os.lstat(_part(out))
        TemporaryFile(dir=folder).close()  # has no name where the system can, so that nothing is left of it
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}.") from error


def _part(out: Path) -> Path:
    """A name beside ``out``, of this writer alone: another process may be writing the same result."""
    return out.with_name(f"{out.name}.{secrets.token_hex(4)}.part")


@contextmanager
def replacing(out: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes ``out``'s name when all is written; nothing is left of it after a fault."""
    part = _part(out)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"{out} cannot be written: {error.strerror or error}.") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """A new folder, which takes ``out``'s name when all is written; nothing is left of it after a fault. What it replaces must
    be a model's folder."""
    if out.exists() and not (out / "config.json").is_file():
        raise UsageError(f"{out} is no model's folder, and is not replaced; give another name.")
    place = out.resolve()
    part, before = _part(place), _part(place)
    try:
        part.mkdir()
        yield part
        if place.exists():
            os.replace(place, before)
        os.replace(part, place)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        if before.exists() and not place.exists():  # it ended between the two
            os.replace(before, place)
        for left in (part, before):
            shutil.rmtree(left, ignore_errors=True)


def copy_others(source: Path, target: Path) -> None:
    """The files of a model's folder that are neither weights nor config.json: tokenizer, templates, how texts are embedded,
    generation settings."""
    for pattern in (*(f"*{end}" for end in BESIDE), *BELOW):
        for path in source.glob(pattern):
            name = path.relative_to(source)
            if str(name) not in ("config.json", "model.safetensors.index.json"):
                (target / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target / name)
