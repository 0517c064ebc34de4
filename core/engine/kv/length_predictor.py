"""How many tokens a sequence will have: a guess that only costs speed where it is wrong."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

_BINS_A_DOUBLING = 4
_BINS = 32 * _BINS_A_DOUBLING


class LengthPredictor(Protocol):
    """Output lengths by what is known of a request. Learns from the sequences that end."""

    def predict(self, prompt: int, output: int) -> int:
        """Output tokens, more than ``output``, that a sequence with so many already is to be given room for."""
        ...

    def observe(self, prompt: int, output: int) -> None:
        """A sequence has ended with ``output`` tokens."""
        ...


class LengthHistogram:
    """A quantile of the output lengths seen lately, those of longer prompts apart from those of shorter ones.

    One histogram for each doubling of the prompt's length, of bins that grow by a quarter doubling; with each length
    observed the weight of those before shrinks by 2 %. A prediction is the upper end of the bin that holds the
    ``quantile`` of the lengths above what the sequence has already. Before anything like it was seen, it is that much
    again, and at least 64 tokens more.
    """

    def __init__(self, quantile: float = 0.8) -> None:
        self._quantile = quantile
        self._weights: dict[int, list[float]] = defaultdict(lambda: [0.0] * _BINS)

    def predict(self, prompt: int, output: int) -> int:
        weights = self._weights.get(prompt.bit_length())
        lowest = _bin(output + 1)
        above = weights[lowest:] if weights is not None else []
        wanted = self._quantile * sum(above)
        if wanted < 1e-6:  # nothing like it, or so long ago that it has faded away
            return output + max(output, _FIRST)
        reached = 0.0
        for n, weight in enumerate(above, start=lowest):
            reached += weight
            if reached >= wanted:
                return max(_upper(n), output + 1)
        return _upper(_BINS - 1)

    def observe(self, prompt: int, output: int) -> None:
        weights = self._weights[prompt.bit_length()]
        weights[:] = [weight * _DECAY for weight in weights]
        weights[_bin(output)] += 1.0


_FIRST, _DECAY = 64, 0.98


def _bin(length: int) -> int:
    """Lengths 2^n to 2^(n+1) - 1 are four bins."""
    n = max(length, 1).bit_length() - 1
    quarter = (max(length, 1) - (1 << n)) * _BINS_A_DOUBLING >> n
    return min(n * _BINS_A_DOUBLING + quarter, _BINS - 1)


def _upper(number: int) -> int:
    """The greatest length of a bin."""
    n, quarter = divmod(number, _BINS_A_DOUBLING)
    return max((1 << n) + ((quarter + 1 << n) - 1) // _BINS_A_DOUBLING, 1 << n)
