"""How much of prompts may join a step of decodes: as much as keeps the times between their tokens even."""

from __future__ import annotations

_WEIGHT = 0.3  # of a new time in a mean
_AGAIN = 64  # steps with prompts after which the time of decodes alone is measured anew
_HORIZON = 256  # tokens of prompts whose time tells what the next will take
_GRAIN = 8  # tokens: a chunk is a multiple of it, since kernels take rows in tiles


class Pace:
    """Learns from steps what decodes alone take and what a prompt's token adds, and says how many tokens of prompts make a
    step of decodes ``slowdown`` (above 1) times as long. Where more requests wait for their prompts than decode, it may take as
    many times longer: more are served by it, and the more decode, the less a step costs each.

    Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310) chooses its budget by a profile of the device; here the steps
    themselves are the profile. Decodes whose time is not known, or was long ago, get one step of their own.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._alone: dict[int, float] = {}  # seconds of a step, by the size of its decodes
        self._since: dict[int, int] = {}  # steps with prompts since that was measured
        self._seconds = 0.0  # that the last prompts' tokens have added
        self._tokens = 0.0
        self._allowed = 0  # tokens of prompts, the last time: at most twice as many the next, whatever one step took

    def allowance(self, decodes: int, prompts: int) -> int | None:
        """Most tokens of prompts in a step with so many decodes, while so many prompts are not computed to their end; None for
        no limit."""
        if decodes == 0:
            return None
        size = _size(decodes)
        if self._since.get(size, _AGAIN) >= _AGAIN:
            return 0
        room = (self._slowdown * max(prompts / decodes, 1.0) - 1) * self._alone[size]
        tokens = int(room * self._tokens / max(self._seconds, 1e-9))
        self._allowed = max(min(tokens, 2 * self._allowed) // _GRAIN * _GRAIN, _GRAIN)
        return self._allowed

    def note(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Takes what a step was and how long it took."""
        size = _size(decodes)
        if prompt_tokens == 0:
            before = self._alone.get(size, seconds)
            self._alone[size] = before + _WEIGHT * (seconds - before)
            self._since[size] = 0
        elif decodes == 0 or size in self._alone:
            kept = max(1 - prompt_tokens / _HORIZON, 0.0)
            self._seconds = kept * self._seconds + seconds - (self._alone[size] if decodes else 0.0)
            self._tokens = kept * self._tokens + prompt_tokens
            self._since[size] = self._since.get(size, 0) + 1


def _size(decodes: int) -> int:
    """Numbers of decodes that are taken for one: the same three leading binary digits, at most a quarter apart."""
    spare = max(decodes.bit_length() - 3, 0)
    return decodes >> spare << spare
