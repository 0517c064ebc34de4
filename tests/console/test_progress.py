"""Progress bars: after a second, on a terminal alone, gone before anything else is written."""

from __future__ import annotations

import io
import sys
import time

from engine.console import progress
from engine.console.progress import Wait


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch) -> Terminal:
    """In place of stderr; to be called by the test itself, since pytest puts its own back after a fixture."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def _shown(stream: io.StringIO, text: str) -> bool:
    """Whether the text comes up within some seconds."""
    end = time.monotonic() + 10
    while text not in stream.getvalue() and time.monotonic() < end:
        time.sleep(0.02)
    return text in stream.getvalue()


def test_a_long_wait_shows_what_is_done(monkeypatch):
    stderr = _terminal(monkeypatch)
    monkeypatch.setattr(progress, "DELAY_S", 0.05)
    with Wait("Loading") as wait:
        assert _shown(stderr, "Loading")
        wait.update("Packing", 30, 120)
        assert _shown(stderr, "Packing") and _shown(stderr, "25 %")
        wait.close()
        closed = stderr.getvalue()
        wait.update("Late", 1, 2)
        time.sleep(0.2)
    assert stderr.getvalue() == closed


def test_a_short_wait_shows_nothing(monkeypatch):
    stderr = _terminal(monkeypatch)
    with Wait("Loading") as wait:
        wait.update("Packing", 1, 2)
    time.sleep(progress.DELAY_S + 0.2)
    assert stderr.getvalue() == ""


def test_nothing_is_shown_where_stderr_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", 0.01)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Wait("Loading") as wait:
        time.sleep(0.2)
        wait.update("Packing", 1, 2)
    assert sys.stderr.getvalue() == ""
