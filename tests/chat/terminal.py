"""A real terminal for a program: a pseudo-terminal, and a screen that obeys its escape sequences."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pexpect
import pyte


class Terminal:
    """A chat that was started in a terminal of so many rows and columns."""

    def __init__(self, arguments: list[str], rows: int = 30, columns: int = 100, **environment: str) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=20_000)
        self._stream = pyte.Stream(self.screen)
        own = {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        kept = {name: value for name, value in (os.environ | own | environment).items() if value}
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "engine.cli.main", "chat", *arguments],
            dimensions=(rows, columns),
            encoding="utf-8",
            env=kept,
        )
        self.child.delaybeforesend = None
        self.screen.write_process_input = self.child.send  # where the cursor is, when the program asks

    def text(self) -> str:
        """All that was shown, with what has scrolled away."""
        above = ["".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in (*above, *self.screen.display))

    def wait(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Until the pattern is on the screen, or in what has scrolled away."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text())):
            assert time.monotonic() < end, f"{pattern!r} did not come:\n{self.text()}"
            self._read()
        return found

    def wait_prompt(self) -> None:
        """Until the program waits for input, with an empty prompt as the last line above the status."""
        end = time.monotonic() + 60
        while not re.search(r"\n> ?\n+[^\n]*context[^\n]*\n*$", self.text()):
            assert time.monotonic() < end, f"no prompt came:\n{self.text()}"
            self._read()

    def _read(self) -> None:
        try:
            self._stream.feed(self.child.read_nonblocking(1 << 16, timeout=0.2))
        except pexpect.TIMEOUT:
            pass
        except pexpect.EOF as error:
            raise AssertionError(f"it has ended:\n{self.text()}") from error

    def send(self, text: str) -> None:
        self.child.send(text)

    def write(self, data: bytes) -> None:
        """What is no text."""
        os.write(self.child.child_fd, data)

    def line(self, text: str) -> None:
        """Type a line, and press Enter."""
        self.child.send(text + "\r")

    def resize(self, rows: int, columns: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def kill(self) -> None:
        self.child.kill(signal.SIGKILL)
        self.child.wait()

    def ended(self) -> int:
        """The exit status, once the program has ended by itself."""
        while True:
            try:
                self._stream.feed(self.child.read_nonblocking(1 << 16, timeout=60))
            except pexpect.EOF:
                break
        self.child.wait()
        return self.child.exitstatus

    def close(self) -> None:
        self.child.close(force=True)
