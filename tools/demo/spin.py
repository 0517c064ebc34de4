"""Texts with choices: ``[a|b [c|d]|]`` is one of its alternatives, drawn anew each time."""

from __future__ import annotations

import random
from functools import cache

Part = str | tuple["Sequence", ...]
Sequence = tuple[Part, ...]


def spin(text: str, rng: random.Random) -> str:
    """One text of the pattern, spaces set right. Raises ValueError where brackets do not match."""
    return " ".join(_draw(_parse(text), rng).split())


@cache
def _parse(text: str) -> Sequence:
    sequence, end = _sequence(text, 0)
    if end != len(text):
        raise ValueError(f"{text!r} has no [ for what is at {end}; each [ needs its ].")
    return sequence


def _sequence(text: str, at: int, inside: bool = False) -> tuple[Sequence, int]:
    """Parts up to the end, or inside of brackets up to the next | or ]."""
    parts: list[Part] = []
    plain = at
    while at < len(text) and not (inside and text[at] in "|]"):
        if text[at] == "]":
            break
        if text[at] == "[":
            parts.append(text[plain:at])
            choices = []
            while True:
                choice, at = _sequence(text, at + 1, True)
                choices.append(choice)
                if at == len(text):
                    raise ValueError(f"{text!r} has a [ that nothing closes; each [ needs its ].")
                if text[at] == "]":
                    break
            parts.append(tuple(choices))
            plain = at = at + 1
        else:
            at += 1
    parts.append(text[plain:at])
    return tuple(parts), at


def _draw(sequence: Sequence, rng: random.Random) -> str:
    return "".join(part if isinstance(part, str) else _draw(rng.choice(part), rng) for part in sequence)
