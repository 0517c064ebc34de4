"""How much of prompts may join a step of decodes: as much as keeps the times between their tokens even."""

from __future__ import annotations

_WEIGHT = 0.3  # of a new time in a mean
_AGAIN = 64  # steps with prompts after which the time of decodes alone is measured anew
_GRAIN = 8  # tokens: a chunk is a multiple of it, since kernels take rows in tiles


class Pace:
    """Learns from steps what decodes alone take and what a prompt's token adds, and says how many tokens of prompts make a
    step of decodes ``slowdown`` (above 1) times as long.

    Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310) chooses its budget by a profile of the device; here the steps
    themselves are the profile. Decodes whose time is not known, or was long ago, get one step of their own.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._alone: dict[int, float] = {}  # seconds of a step, by the number of decodes in powers of two
        self._since: dict[int, int] = {}  # steps with prompts since that was measured
        self._token: float | None = None  # seconds that a prompt's token adds
        self._allowed = 0  # tokens of prompts, the last time: at most twice as many the next, whatever one step took

    def allowance(self, decodes: int) -> int | None:
        """Most tokens of prompts in a step with so many decodes; None for no limit."""
        if decodes == 0:
            return None
        size = decodes.bit_length()
        if self._since.get(size, _AGAIN) >= _AGAIN:
            return 0
        tokens = 0 if self._token is None else int((self._slowdown - 1) * self._alone[size] / self._token)
        self._allowed = max(min(tokens, 2 * self._allowed) // _GRAIN * _GRAIN, _GRAIN)
        return self._allowed

    def note(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Takes what a step was and how long it took."""
        size = decodes.bit_length()
        if prompt_tokens == 0:
            self._alone[size] = _mean(self._alone.get(size), seconds)
            self._since[size] = 0
        elif decodes == 0 or size in self._alone:
            added = max(seconds - self._alone[size], 0.0) if decodes else seconds
            # dearer at once, cheaper by and by: the further a prompt is, the more its tokens take
            self._token = max(_mean(self._token, added / prompt_tokens), added / prompt_tokens, 1e-9)
            self._since[size] = self._since.get(size, 0) + 1


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)
