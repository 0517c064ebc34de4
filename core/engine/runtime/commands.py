"""What other threads want of the step loop: done on its thread, between steps, in the order in which it came."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable

from ..errors import EngineStoppedError

Command = Callable[[], None]
Done = Callable[[BaseException | None], None]
"""Takes what a command has raised, or None, on the loop's thread."""


class Commands:
    """All but ``take`` may be called from any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._process = os.getpid()

    def check_process(self) -> None:
        """EngineStoppedError in a process that was forked from the loop's, which has no such thread."""
        if os.getpid() != self._process:
            raise EngineStoppedError(
                "This process was forked from the one that loaded the model and has none of its threads; load the model "
                "here, or start the process with multiprocessing's method 'spawn'."
            )

    def put(self, action: Command) -> None:
        """Nobody waits for it, and it must not raise."""
        self._queue.put(action)

    def put_told(self, action: Command, done: Done) -> None:
        """Nobody waits for it, and ``done`` hears how it went."""

        def run() -> None:
            try:
                action()
            except BaseException as error:
                done(error)
            else:
                done(None)

        self._queue.put(run)

    def call(self, action: Command, check: Callable[[], None]) -> None:
        """Waits for it, and raises here what it raises; ``check`` raises where the loop will never come to it."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.put_told(action, done.put)
        while True:
            try:
                error = done.get(timeout=1.0)
            except queue.Empty:
                check()
                continue
            if error is not None:
                raise error
            return

    def take(self, wait: bool) -> Command | None:
        """The next one; None where there is none and the loop has something else to do."""
        try:
            return self._queue.get(block=wait)
        except queue.Empty:
            return None
