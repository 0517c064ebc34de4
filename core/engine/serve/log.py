"""The log: one JSON object a line on stderr, never with a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from engine.errors import EngineError

from .errors import ApiError


def log(event: str, **fields: Any) -> None:
    """Writes a line; fields that are None are left out. Where nobody reads any more the server goes on."""
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z", "event": event}
    record |= {name: value for name, value in fields.items() if value is not None}
    with suppress(OSError):
        print(json.dumps(record, ensure_ascii=False), file=sys.stderr, flush=True)


def log_defect(error: Exception, request_id: str | None = None) -> None:
    """Where an exception comes from that nobody has raised on purpose. Its message is left out: it may quote a prompt."""
    if not isinstance(error, (ApiError, EngineError)):
        frames = [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
        ]
        log("defect", error=type(error).__name__, request_id=request_id, frames=frames)


class _OfLibraries(logging.Handler):
    """What libraries warn of, as lines of the same log, without what may quote a prompt."""

    def emit(self, record: logging.LogRecord) -> None:
        log("library", logger=record.name, warning=record.getMessage().partition("\n")[0])
        if record.exc_info is not None and isinstance(error := record.exc_info[1], Exception):
            log_defect(error)


def log_libraries() -> None:
    """From now on, in all of the process."""
    logging.getLogger().addHandler(_OfLibraries())
