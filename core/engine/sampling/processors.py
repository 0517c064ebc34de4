"""Logits processors of other distributions, by entry points of the group ``engine.logits_processors``.

An entry point names a factory, ``factory(vocab_size, **parameters)``, whose result is a ``LogitsProcessor``. It runs on
the host before the step of each row, so its sequences get one step at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np

from ..errors import RequestError
from .params import MAX_BIAS

GROUP = "engine.logits_processors"

Array = np.ndarray[Any, np.dtype[Any]]
Bias = tuple[Array, Array]
"""Token ids i32 [n] and what is added to their logits, f32 [n]."""


class LogitsProcessor(Protocol):
    """Serves all sequences of a request, and is told all there is to know at each call."""

    def __call__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Mapping[int, float] | Array:
        """What to add to the next token's logits, by token id (-inf bans it), or a bool [vocab_size]: the tokens that are
        allowed. Whatever it raises ends the request."""
        ...


@dataclass(frozen=True)
class NamedProcessor:
    """A processor with the name it was asked for by. ``vocab_size`` bounds its ids."""

    name: str
    process: LogitsProcessor
    vocab_size: int

    def bias(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Bias:
        """What the processor wants of one row. RequestError when it raises, or gives what it must not."""
        try:
            given = self.process(prompt_ids, output_ids)
            bias = self._banned(given) if isinstance(given, np.ndarray) else self._added(given)
        except BaseException as error:  # it is someone else's: whatever happens in it ends its own request
            raise RequestError(f"The logits processor {self.name!r} failed: {_said(error)}") from error
        return bias

    def _banned(self, allowed: Array) -> Bias:
        if allowed.dtype != np.bool_ or allowed.shape != (self.vocab_size,):
            raise ValueError(f"it gave {allowed.dtype} {allowed.shape}, and a mask is bool ({self.vocab_size},)")
        ids = np.flatnonzero(~allowed).astype(np.int32)
        return ids, np.full(len(ids), -np.inf, np.float32)

    def _added(self, given: Mapping[int, float]) -> Bias:
        wrong = next((key for key in given if isinstance(key, bool) or not isinstance(key, (int, np.integer))), None)
        if wrong is not None:
            raise ValueError(f"it gave {wrong!r} in the place of a token id")
        ids, values = np.array(list(given.keys()), np.int64), np.array(list(given.values()), np.float64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"it gave a token id outside of 0 to {self.vocab_size - 1}")
        if not ((np.abs(values) <= MAX_BIAS) | (values == -np.inf)).all():
            raise ValueError(f"it gave a bias that is neither from -{MAX_BIAS:g} to {MAX_BIAS:g} nor -inf")
        return ids.astype(np.int32), values.astype(np.float32)


def make_processors(wanted: Mapping[str, Mapping[str, Any]], vocab_size: int) -> tuple[NamedProcessor, ...]:
    """The processors of a request. RequestError if one is not installed, or refuses its parameters."""
    if not wanted:
        return ()
    found = {point.name: point for point in entry_points(group=GROUP)}
    made = []
    for name, parameters in wanted.items():
        if name not in found:
            known = ", ".join(sorted(found)) or "none"
            raise RequestError(f"There is no logits processor {name!r}; installed are: {known}.")
        try:
            made.append(NamedProcessor(name, found[name].load()(vocab_size, **parameters), vocab_size))
        except Exception as error:  # a plugin may fail in any way
            raise RequestError(f"The logits processor {name!r} could not be made: {_said(error)}") from error
    return tuple(made)


def _said(error: BaseException) -> str:
    """An exception's kind, and what it says of itself, which may fail, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}."
