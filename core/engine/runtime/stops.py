"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

Match = tuple[int, str]
"""Where in a piece a string begins, negative if in an earlier one, and which it is."""


class StopSearch:
    """Finds any of some strings, and the end of the text that may be the beginning of one (Aho and Corasick 1975).

    A text is known by its place: the longest end of it that begins a string, as a node of the tree of all beginnings.
    The root, 0, is the empty one. A character costs the same however many and long the strings are.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._shorter = [0]  # the place of the next shorter end
        self._whole = [""]  # the longest string that ends there
        depths = [0]
        places = dict.fromkeys(strings, 0)
        for depth in range(max(map(len, places), default=0)):  # so that all shorter ends are there first
            places = {string: place for string, place in places.items() if len(string) > depth}
            for string, place in places.items():
                places[string] = self._grow(place, string[depth])
                if len(string) == depth + 1:
                    self._whole[places[string]] = string
            depths += [depth + 1] * (len(self._whole) - len(depths))
        goes_on = {place for place, _ in self._next}
        self._held = [0]
        for place in range(1, len(depths)):
            self._held.append(depths[place] if place in goes_on else self._held[self._shorter[place]])

    def read(self, place: int, piece: str) -> tuple[int, Match | None]:
        """The place after one more piece, and the match within it that begins first, the shortest of those."""
        found: Match | None = None
        for end, character in enumerate(piece, start=1):
            place = self._step(place, character)
            if whole := self._whole[place]:
                match = end - len(whole), whole
                found = match if found is None else min(found, match)
        return place, found

    def held(self, place: int) -> int:
        """Length of the longest end of the text that begins a string and is not all of it."""
        return self._held[place]

    def _step(self, place: int, character: str) -> int:
        while (following := self._next.get((place, character))) is None:
            if place == 0:
                return 0
            place = self._shorter[place]
        return following

    def _grow(self, place: int, character: str) -> int:
        known = self._next.get((place, character))
        if known is not None:
            return known
        shorter = self._step(self._shorter[place], character) if place else 0
        new = self._next[place, character] = len(self._whole)
        self._shorter.append(shorter)
        self._whole.append(self._whole[shorter])
        return new


@lru_cache(maxsize=16)
def stop_search(strings: tuple[str, ...]) -> StopSearch:
    """The search for these strings, the same one for all that ask for it."""
    return StopSearch(strings)
