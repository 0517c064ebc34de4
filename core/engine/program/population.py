"""Memory that a system gives only when it is first written to, asked for beforehand."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_PIECE = 4 << 20  # bytes of a state that are asked for at a time
_LEAST_PRIORITY = 19
_POLL_S = 0.02


@dataclass(frozen=True)
class Room:
    """A state whose memory is asked for by ``populate(state, first, count)``: ``entries`` of so many bytes."""

    populate: Callable[[Any, int, int], None]
    state: Any
    entries: int
    entry_bytes: int


class Population:
    """A thread that asks for the states' memory, of all states what steps use first before what they use later.

    It pauses while ``busy()``: the least priority alone does not keep it from the processor, as a step's threads wait for
    each other, and it then holds up all of them for a piece (on two cores steps took twice as long beside it)."""

    def __init__(self, rooms: Sequence[Room], busy: Callable[[], bool]) -> None:
        self._rooms = rooms
        self._busy = busy
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when no state is used any more."""
        self._stopping.set()
        self._thread.join()

    def wait(self) -> None:
        """Returns when all memory has been given."""
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        entries = max((room.entries for room in self._rooms), default=0)
        step = max(_PIECE // max((room.entry_bytes for room in self._rooms), default=1), 1)
        for first in range(0, entries, step):
            for room in self._rooms:
                while self._busy() and not self._stopping.wait(_POLL_S):
                    pass
                if self._stopping.is_set():
                    return
                if first < room.entries:
                    room.populate(room.state, first, min(step, room.entries - first))
