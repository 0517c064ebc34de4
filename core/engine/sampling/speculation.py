"""Guessing what comes next, so that one step can check several tokens: prompt lookup (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (3, 2)  # of the n-grams that are looked up, the longest first
_FIRST = 3  # tokens of a first guess
_MOST_MISSES = 5


class PromptLookup:
    """Guesses for one sequence: where its last tokens stood before, it goes on as it did there. What comes of guesses sets how
    long the next one is; after guesses of which nothing held, ever more tokens go by without one."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram -> the position after it, where it stood last
        self._known = 0
        self._length = _FIRST
        self._misses = self._silent = 0

    def guess(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """At most ``most`` tokens that may follow ``token_ids``, which begin as they did before; often none."""
        end = len(token_ids)
        for at in range(max(self._known, 1), end):
            for size in _SIZES:
                if at >= size:
                    self._after[tuple(token_ids[at - size : at])] = at
        self._known = max(self._known, end)
        if self._silent:
            self._silent -= 1
            return ()
        found = next((self._after[gram] for gram in self._last(token_ids) if gram in self._after), end)
        period = end - found  # a text that repeats itself is guessed to go on so
        return tuple(token_ids[found + n % period] for n in range(min(most, self._length))) if period else ()

    def learn(self, guessed: int, held: int) -> None:
        """So many tokens of a guess held."""
        if held:
            self._misses = 0
            self._length = 2 * guessed if held == guessed else held + 1
        else:
            self._misses = min(self._misses + 1, _MOST_MISSES)
            self._length, self._silent = 1, 2**self._misses - 1

    @staticmethod
    def _last(token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(token_ids[-size:]) for size in _SIZES if len(token_ids) >= size]
