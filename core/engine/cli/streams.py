"""stdin, stdout and stderr as a command finds them, and what the system says when it refuses to read, to write or to give."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_THREAD = "can't start new thread"  # Python's words for it, in a RuntimeError
_NAMES = ("stdin", "stdout", "stderr")


def prepare() -> None:
    """UTF-8 everywhere, and all three open: a file that took the number of a closed one would get what is printed.

    What was closed fails when it is used, as it does in C; stderr alone takes what nobody can read.
    """
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            wrong_way = os.O_WRONLY if name == "stdin" else os.O_RDONLY
            opened = os.open(os.devnull, os.O_WRONLY if name == "stderr" else wrong_way)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8"))
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if hasattr(stream, "reconfigure"):
            with suppress(io.UnsupportedOperation):  # it has been read from by who calls us
                stream.reconfigure(encoding="utf-8", errors=errors)


def silence(stream: TextIO) -> None:
    """What is still to be written to it goes nowhere, also when the interpreter ends."""
    with suppress(OSError, ValueError):  # it has no number, as in tests
        number = os.open(os.devnull, os.O_WRONLY)
        os.dup2(number, stream.fileno())
        os.close(number)


def refused(error: Exception) -> str | None:
    """The sentence for what the system refused; None where that would be a defect."""
    no_thread = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    if no_thread or isinstance(error, MemoryError):
        what = "threads" if no_thread else "memory"
        return f"The system gives this process no more {what}; ulimit -a shows what it is allowed."
    return _refused_io(error) if isinstance(error, OSError) else None


def _refused_io(error: OSError) -> str | None:
    try:
        sys.stdout.flush()  # what a buffer could not write is still there, and fails again
    except OSError as again:
        silence(sys.stdout)
        return f"The output cannot be written: {again.strerror}."
    if error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used: {error.strerror}."
    if error.errno in _FULL:
        return f"The output, or a file, cannot be written: {error.strerror}."
    if error.errno == errno.EBADF:
        return "The input cannot be read: stdin is closed."
    return None


def not_utf8(arguments: Sequence[str]) -> str | None:
    """The first argument that is no text, with its bytes made visible."""
    for argument in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            return os.fsencode(argument).decode("utf-8", "backslashreplace")
    return None
