"""Read-only memory mapping of files, with the operating system's errors as sentences."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from engine.backend.host import mapping_of
from engine.errors import FormatError
from engine.formats.quantformats import Bytes


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turns an OSError inside into a FormatError that names the file."""
    try:
        yield
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from error


def release(data: Bytes) -> None:
    """Lets the memory of mapped bytes go; they are read from the file again if they are touched again."""
    owner, first = mapping_of(data)
    if owner is None or not hasattr(mmap, "MADV_DONTNEED") or not data.nbytes:
        return
    start = first - first % mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, start, first + data.nbytes - start)


_POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_BYTES = len(_POINTER)


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """FormatError for what git leaves in a large file's place where Git LFS is not installed."""
    if beginning.startswith(_POINTER):
        raise FormatError(f"{path} is a pointer of Git LFS in place of the file; git lfs pull gets the file itself.")


def map_file(path: Path) -> Bytes:
    """The whole file as a read-only uint8 array, which keeps the mapping alive."""
    with read_errors(path), path.open("rb") as file:
        if file.seek(0, 2) == 0:
            raise FormatError(f"{path} is empty.")
        file.seek(0)
        refuse_pointer(path, file.read(POINTER_BYTES))
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
