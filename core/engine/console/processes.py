"""Which processes of this user have a model loaded, for ``engine ps``: a file each, whose lock lasts as long as the process.

A process that is killed leaves its file without the lock, and the next listing takes it away.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.runtime.load import Loaded


@dataclass(frozen=True)
class Running:
    """A process with a model: bytes of its weights and KV cache, tokens of its context, seconds since 1970."""

    pid: int
    command: str
    model: str
    backend: str
    weights: int
    kv: int
    context: int
    since: float


def _folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_state_dir("engine", appauthor=False)) / "running"


@contextmanager
def shown(loaded: Loaded) -> Iterator[None]:
    """This process and its model are listed. Where that cannot be written, they are not, and nothing else is lost."""
    from filelock import FileLock, Timeout

    path = _folder() / f"{os.getpid()}-{id(loaded):x}.json"
    lock = FileLock(path.with_suffix(".lock"), timeout=0, thread_local=False)  # another thread may end it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        path.write_text(json.dumps(asdict(_describe(loaded))))
    except (OSError, Timeout):
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _describe(loaded: Loaded) -> Running:
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return Running(
        pid=os.getpid(),
        command=command,
        model=str(loaded.config.model),
        backend=loaded.device.describe().backend,
        weights=loaded.memory.weights,
        kv=loaded.memory.kv,
        context=loaded.max_model_len,
        since=time.time(),
    )


def running() -> list[Running]:
    """What runs now, the oldest first."""
    from filelock import FileLock, Timeout

    found = []
    for path in _folder().glob("*.json"):
        lock = FileLock(path.with_suffix(".lock"), timeout=0)
        try:
            with lock:
                path.unlink(missing_ok=True)  # whoever wrote it is gone
            Path(lock.lock_file).unlink(missing_ok=True)
        except Timeout:
            try:
                found.append(Running(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError):  # it is being written, or ends just now
                continue
        except OSError:
            continue
    return sorted(found, key=lambda one: one.since)
