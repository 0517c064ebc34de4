"""Reasoning at the beginning of an answer, between <think> and </think>."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, inside: bool, finished: bool) -> tuple[str, str, bool]:
    """The reasoning at the beginning of a text and what follows it, as far as both are certain, and whether the reasoning still
    goes on. ``inside``: the prompt ended in an open block."""
    body = text.lstrip()
    if body.startswith(OPEN):
        body = body[len(OPEN) :]
    elif OPEN.startswith(body) and not finished:  # it may become the mark
        return "", "", inside or bool(body)
    elif not inside:
        return "", text, False
    thought, closed, rest = body.partition(CLOSE)
    if closed:
        return thought.strip(), rest.lstrip("\n"), False
    held = max((n for n in range(1, len(CLOSE)) if thought.endswith(CLOSE[:n])), default=0)
    return (thought if finished else thought[: len(thought) - held]).strip(), "", True
