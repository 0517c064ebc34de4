"""What a person sees: notes on stderr, answers on stdout, in plain form."""

from __future__ import annotations

import sys
from typing import Protocol

from engine.console.notes import visible

from .answer import Answer, Usage


def status_line(model: str, used: int | None, limit: int | None, usage: Usage, *marks: str) -> str:
    """Model and ``marks``, which a narrow terminal shows too; context used and its limit, speed, time to the first token,
    cached tokens."""
    parts = [model, *marks]
    if limit:
        parts.append(f"context ?/{limit}" if used is None else f"context {used}/{limit} ({100 * used // limit} %)")
    elif used is not None:
        parts.append(f"context {used}")
    if usage.tokens_a_second is not None:
        parts.append(f"{usage.tokens_a_second:.1f} tok/s")
    if usage.first_token_s is not None:
        parts.append(f"first token {usage.first_token_s:.2f} s")
    if usage.cached_tokens is not None:
        parts.append(f"{usage.cached_tokens} cached")
    return ", ".join(parts)


class Screen(Protocol):
    """Where an answer is written while it comes."""

    def update(self, answer: Answer, status: str) -> None:
        """The answer so far, and the status line now."""

    def close(self, status: str) -> None:
        """The answer has ended, or was stopped."""


class Plain:
    """Text on stdout as it comes. On a terminal it is made visible, elsewhere it is written as it is."""

    def __init__(self, think: str) -> None:
        self._terminal = sys.stdout.isatty()
        self._think = think if self._terminal or think == "show" else "hide"
        self._written = {"reasoning": 0, "shown": 0}
        self._came = False

    def update(self, answer: Answer, status: str) -> None:
        self._came = self._came or answer != Answer()
        if self._think in ("show", "dim"):
            self._write("reasoning", answer.reasoning)
        if answer.shown and self._written["reasoning"] and not self._written["shown"]:
            print("\n")
        self._write("shown", answer.shown)

    def _write(self, what: str, text: str) -> None:
        new = text[self._written[what] :]
        if new:
            sys.stdout.write(visible(new) if self._terminal else new)
            sys.stdout.flush()
            self._written[what] = len(text)

    def close(self, status: str) -> None:
        if any(self._written.values()):
            print(flush=True)
        if self._came:
            print(visible(f"[{status}]"), file=sys.stderr, flush=True)
