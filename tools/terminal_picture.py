"""Draws docs/chat.svg: what a terminal shows after a real session of ``engine chat`` with the built-in demo.

usage: python tools/terminal_picture.py [--target FILE]      (needs pexpect and pyte, which the extra `test` brings)
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

import pexpect
import pyte

ROWS, COLUMNS = 30, 92
QUESTIONS = ("what are you?", "tell me a story about a fox", "how do I use another model?")
TARGET = Path(__file__).resolve().parents[1] / "docs/chat.svg"
SECONDS = 60.0  # for one answer
ADVANCE, LEADING, MARGIN = 8.4, 19, 18  # of a character, of a line, around all: pixels at 14 px of a monospaced font
PAPER, INK = "#1d1f27", "#d5d8e0"
COLOURS = {
    "black": "#60646f", "red": "#ef7b85", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef", "magenta": "#c678dd",
    "cyan": "#56b6c2", "white": "#d5d8e0", "brightblack": "#8a8f9c", "default": INK,
}  # fmt: skip


class Session:
    """A chat in a pseudo-terminal, and the screen that it draws."""

    def __init__(self, home: str) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.Stream(self.screen)
        folders = {f"XDG_{name}_HOME": f"{home}/{name}" for name in ("DATA", "STATE", "CONFIG", "CACHE")}
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "engine.cli.main", "chat", "--temperature", "0.7", "--seed", "7"],
            dimensions=(ROWS, COLUMNS),
            encoding="utf-8",
            env={**kept, **folders, "TERM": "xterm-256color", "HOME": home},
        )
        self.screen.write_process_input = self.child.send

    def until_prompt(self) -> None:
        """Until the line above the status is an empty prompt, and nothing has come for a while."""
        end = time.monotonic() + SECONDS
        while True:
            try:
                self._stream.feed(self.child.read_nonblocking(1 << 16, timeout=0.5))
            except pexpect.TIMEOUT:
                shown = [line.rstrip() for line in self.screen.display if line.strip()]
                if len(shown) > 1 and shown[-2] == ">" and "context" in shown[-1]:
                    return
            if time.monotonic() > end:
                raise SystemExit("The chat gave no prompt:\n" + "\n".join(self.screen.display))

    def ask(self, question: str) -> None:
        self.child.send(question + "\r")
        self.until_prompt()


def colour(name: str) -> str:
    return COLOURS.get(name, f"#{name}" if len(name) == 6 else INK)


def runs(line: Any) -> list[tuple[int, str, Any]]:
    """Texts of one style each, with the column where they begin."""
    found: list[tuple[int, str, Any]] = []
    for x in range(COLUMNS):
        cell = line[x]
        style = (cell.fg, cell.bg, cell.bold, cell.italics, cell.reverse)
        if found and found[-1][2] == style:
            found[-1] = (found[-1][0], found[-1][1] + cell.data, style)
        else:
            found.append((x, cell.data, style))
    return found


def draw(screen: pyte.Screen) -> str:
    """The screen as SVG, without anything from elsewhere."""
    last = max(y for y, line in enumerate(screen.display) if line.strip())
    width, height = COLUMNS * ADVANCE + 2 * MARGIN, (last + 1) * LEADING + 2 * MARGIN + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
        ' aria-label="A session of engine chat" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
        *(
            f'<circle cx="{20 + 18 * i}" cy="18" r="5.5" fill="{c}"/>'
            for i, c in enumerate(("#ef7b85", "#e5c07b", "#98c379"))
        ),
    ]
    for y in range(last + 1):
        top = MARGIN + 20 + y * LEADING
        for x, text, (fg, bg, bold, italics, reverse) in runs(screen.buffer[y]):
            ink, paper = (bg, fg) if reverse else (fg, bg)
            left, wide = MARGIN + x * ADVANCE, len(text) * ADVANCE
            if paper != "default" or reverse:
                parts.append(
                    f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{LEADING}"'
                    f' fill="{INK if reverse and paper == "default" else colour(paper)}"/>'
                )
            if text.strip():
                style = (' font-weight="bold"' if bold else "") + (' font-style="italic"' if italics else "")
                fill = PAPER if reverse and ink == "default" else colour(ink)
                parts.append(
                    f'<text x="{left:.1f}" y="{top + 14}" fill="{fill}"{style} textLength="{wide:.1f}"'
                    f' xml:space="preserve">{escape(text)}</text>'
                )
    return "\n".join((*parts, "</svg>")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, help="the SVG to write")
    target = parser.parse_args().target
    with tempfile.TemporaryDirectory() as home:
        session = Session(home)
        session.until_prompt()
        for question in QUESTIONS:
            session.ask(question)
        target.write_text(draw(session.screen))
        session.child.close(force=True)


if __name__ == "__main__":
    main()
