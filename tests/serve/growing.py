"""Answers that are read while they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.answers import Parts, Reader, Reading


def grown(tools: Mapping[str, Any], text: str, cuts: Iterable[int]) -> Parts:
    """What comes last of a text that grows, all of which only ever grows."""
    reading, before = Reading(Reader(tools)), None
    for cut in cuts:
        found = reading.read(text[:cut], finished=False)
        if before is not None:
            assert found.content.startswith(before.content) and found.reasoning.startswith(before.reasoning)
            assert len(found.calls) >= len(before.calls)
            for old, new in zip(before.calls, found.calls, strict=False):
                assert (old.name, old.id) == (new.name, new.id) and new.arguments.startswith(old.arguments)
        before = found
    return reading.read(text, finished=True)
