"""A rank beside rank 0: it loads the model as that does, and runs the steps that it is told of."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from ..backend.v1 import Group, RemapSession, Runs, Session, StepInputs
from .config import EngineConfig

READY, FAILED = "ready", "failed"


@dataclass(frozen=True)
class Remapping:
    """What ``remap`` is called with."""

    unmapped: Sequence[Runs]
    mapped: Sequence[Runs]


Message = StepInputs | Remapping | Literal["open"] | None
"""A step to run, or what is mapped before, a new session to open in place of the last, or the end."""
Reply = tuple[str, str]
"""READY, or FAILED with a sentence."""
_GRACE = 5.0


@dataclass(frozen=True)
class Job:
    """Which rank of which model."""

    config: EngineConfig
    group: Group


def serve(job: Job, receive: Callable[[], Message], tell: Callable[[Reply], None]) -> None:
    """Returns when None is received, or after a failure, which it tells."""
    from .load import load

    rank = None
    try:
        loaded = load(job.config, None, job.group)
        rank = loaded.rank
        tell((READY, ""))
        session: Session | None = None
        while (message := receive()) is not None:
            if isinstance(message, StepInputs):
                assert session is not None
                session.submit(message).wait()
                continue
            if isinstance(message, Remapping):
                assert isinstance(session, RemapSession)
                session.remap(message.unmapped, message.mapped)
                continue
            if session is not None:
                session.close()
            session = loaded.session()
        if session is not None:
            session.close()
    except Exception as error:
        tell((FAILED, " ".join(str(error).split()) or type(error).__name__))
    finally:
        if rank is not None:
            rank.close()


def main() -> None:
    """The rank's process: messages come by standard input, replies go by standard output."""
    # Files of their own: what a library prints is no reply, and a thread may read on while the interpreter ends.
    stream, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def tell(reply: Reply) -> None:
        pickle.dump(reply, replies)
        replies.flush()

    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    job = pickle.load(stream)
    threading.Thread(target=_read, args=(stream, messages), daemon=True).start()
    serve(job, messages.get, tell)
    os._exit(0)  # libraries may take seconds to end by themselves, and rank 0 waits


def _read(stream: IO[bytes], messages: queue.SimpleQueue[Message]) -> None:
    """Rank 0 has ended when the stream has; a step that waits for it is not waited for."""
    try:
        while True:
            messages.put(pickle.load(stream))
    except (EOFError, OSError, pickle.UnpicklingError):
        messages.put(None)
        time.sleep(_GRACE)
        os._exit(1)
