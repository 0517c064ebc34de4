"""Waits that show a progress bar on stderr once they take over a second, and none where stderr is no terminal."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_S = 1.0


class Wait:
    """A wait, as a context. ``update`` may come from any thread; ``close`` takes the bar away, and may come early."""

    def __init__(self, what: str) -> None:
        self._state: tuple[str, int, int | None] = (what, 0, None)
        self._bar: Progress | None = None
        self._lock = threading.Lock()
        self._closed = not sys.stderr.isatty()
        self._timer = threading.Timer(DELAY_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Wait:
        if not self._closed:
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def update(self, what: str, done: int, total: int) -> None:
        """What is being done, how much of it is done, of how much."""
        with self._lock:
            self._state = (what, done, total)
            self._refresh()

    def close(self) -> None:
        """Nothing is shown from here on."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[share]}"), TimeElapsedColumn()
        with self._lock:
            if not self._closed:
                self._bar = Progress(
                    *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
                )
                self._bar.add_task("", share="")
                self._refresh()
                self._bar.start()

    def _refresh(self) -> None:
        if self._bar is not None:
            what, done, total = self._state
            share = f"{100 * done // total} %" if total else ""
            self._bar.update(self._bar.task_ids[0], description=what, completed=done, total=total, share=share)
