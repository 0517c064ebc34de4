"""Markdown on a terminal, rendered while it streams: what is finished scrolls away, what is not is drawn again."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from engine.console.notes import visible

from .answer import Answer

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])  # or rich would drop tags
_REDRAW_S = 0.04


class _Table(TableElement):
    """A table whose long words go on in the next line; rich would cut them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            for column in table.columns:
                column.overflow = "fold"
            yield table


class _Rendered(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _Table}

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False, code_theme="ansi_dark")
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for part in token.children or ():
                part.content = visible(part.content)  # what entities such as &#x202e; have become


def finished_blocks(text: str) -> int:
    """How many characters of the text are blocks that later text cannot change: up to the last blank line outside code
    fences after which a line begins that does not go on a list item."""
    fence, end, blank, at = "", 0, False, 0
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
                fence = ""
        elif not line.strip():
            blank = True
        else:
            if blank and line[0] not in " \t" and (len(line) > 3 or line.endswith("\n")):
                end = at
            blank, fence = False, mark[1] if mark else ""
        at += len(line)
    return end


class _Growing:
    """A text that grows, printed by and by: finished blocks for good, of the others all lines but the screen's last."""

    def __init__(self, console: Console, render: Callable[[str], RenderableType], blocks: bool) -> None:
        self._console = console
        self._render = render
        self._blocks = blocks
        self._done = 0  # characters printed for good
        self._printed = 0  # lines of the block that follows, printed for good
        self._width = console.width
        self.any = False

    def grow(self, text: str, height: int, last: bool) -> list[list[Segment]]:
        """Print what is final, and give the lines of what is not, at most ``height``; with ``last`` all is final."""
        rest = text[self._done :]
        end = len(rest) if last else finished_blocks(rest) if self._blocks else 0
        if end:
            self._print(self._lines(rest[:end])[self._printed :])
            self._done, self._printed = self._done + end, 0
            rest = rest[end:]
        if self._width != self._console.width:  # the lines have changed: better some twice than some never
            self._width, self._printed = self._console.width, 0
        lines = self._lines(rest)
        if len(lines) - self._printed > height:
            upto = len(lines) - height
            self._print(lines[self._printed : upto])
            self._printed = upto
        return lines[self._printed :]

    def _lines(self, text: str) -> list[list[Segment]]:
        text = text.strip("\n")
        if not text.strip():
            return []
        lines = self._console.render_lines(self._render(text), pad=False)
        return [[Segment("")], *lines] if self._done else lines  # a blank line between blocks

    def _print(self, lines: list[list[Segment]]) -> None:
        self.any = self.any or bool(lines)
        for line in lines:
            self._console.print(Segments([*line, Segment.line()]), end="")


class Streaming:
    """An answer on a terminal, with the status line below it. A thread draws, so that the last piece is seen, and time goes
    on, while nothing comes."""

    def __init__(self, think: str, markdown: bool = True) -> None:
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._think = think
        self._thought = _Growing(self._console, lambda text: Text(text, style="dim italic"), blocks=False)
        self._shown = _Growing(self._console, _Rendered if markdown else Text, blocks=markdown)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._state = (Answer(), "")
        self._start = time.monotonic()
        self._thought_s: float | None = None
        self._thought_closed = False
        self._changed, self._ended = threading.Event(), threading.Event()
        self._live.start()
        self._thread = threading.Thread(target=self._keep_drawing, name="screen", daemon=True)
        self._thread.start()

    def update(self, answer: Answer, status: str) -> None:
        if answer.reasoning and not answer.thinking and self._thought_s is None:
            self._thought_s = time.monotonic() - self._start
        self._state = (answer, status)
        self._changed.set()

    def _keep_drawing(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(1.0)
            self._changed.clear()
            start = time.monotonic()
            try:
                self._draw(*self._state, last=False)
            except (OSError, ValueError):  # nobody looks any more
                return
            # a tenth of the time at most: long blocks take longer to render
            self._ended.wait(max(_REDRAW_S, 9 * (time.monotonic() - start)))

    def _draw(self, answer: Answer, status: str, last: bool) -> None:
        height = max(3, self._console.height - 4)
        lines = self._draw_thought(answer, height, last or not answer.thinking)
        lines += self._shown.grow(visible(answer.shown), max(1, height - len(lines)), last)
        body = Segments([segment for line in lines for segment in (*line, Segment.line())])
        self._live.update(
            Group(body, Text(visible(status), style="dim", no_wrap=True, overflow="ellipsis")), refresh=True
        )

    def _draw_thought(self, answer: Answer, height: int, over: bool) -> list[list[Segment]]:
        """Lines of reasoning that are not yet final."""
        if not answer.reasoning or self._think == "hide" or self._thought_closed:
            return []
        self._thought_closed = over
        if self._think == "fold":
            seconds = self._thought_s or time.monotonic() - self._start
            if not over:
                return [[Segment(f"thinking, {seconds:.0f} s")]]
            self._console.print(Text(f"thought for {seconds:.1f} s; /think show unfolds it", style="dim italic"))
            return []
        lines = self._thought.grow(visible(answer.reasoning), height, over)
        if over:
            self._console.print()
        return lines

    def close(self, status: str) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join()
        self._draw(self._state[0], status, last=True)
        self._live.update(Text(""))
        self._live.stop()
