"""Embeddings: how the hidden states of a text's tokens, as the final norm leaves them, become one vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from ..backend.v1 import Array
from ..errors import EngineError, RequestError
from ..formats.pooling import Dense, Embedding, Pooling
from ..sampling.params import plain_number
from ..scheduler import ScheduledStep
from .outputs import RequestOutput

KINDS: tuple[Pooling, ...] = get_args(Pooling)


@dataclass(frozen=True)
class PoolingParams:
    """``pooling``: the state of the last token, the mean of all, or that of the first ("cls"); ``normalize``: to length 1;
    both as the model's files say where they are None. ``dimensions``: only so many of the first are kept, as models that
    were trained for it (Matryoshka) allow."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in KINDS:
            raise RequestError(f"pooling is {self.pooling!r}; it is one of {', '.join(KINDS)}.", "pooling")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise RequestError(f"normalize is {self.normalize!r}; it is true or false.", "normalize")
        given = plain_number(self.dimensions)
        object.__setattr__(self, "dimensions", given)
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise RequestError(f"dimensions is {given!r}; it is a whole number of at least 1.", "dimensions")

    def pooler(self, usual: Embedding, hidden: int, causal: bool = True) -> Pooler:
        """What pools one text of a model with states of ``hidden`` numbers, an encoder unless ``causal``. Where nobody says what
        is pooled it is the last state of a decoder, and the mean of an encoder's. RequestError for more dimensions than there
        are."""
        taken, width = (
            (usual.layers[0].weight.shape[1], usual.layers[-1].weight.shape[0]) if usual.layers else (hidden, hidden)
        )
        if taken != hidden:
            raise RequestError(
                f"The files' first layer behind the pooling takes {taken} numbers, and states have {hidden}; they are"
                " inconsistent."
            )
        if self.dimensions is not None and self.dimensions > width:
            raise RequestError(f"dimensions is {self.dimensions}; embeddings of this model have {width}.", "dimensions")
        normalize = usual.normalize if self.normalize is None else self.normalize
        pooling = self.pooling or usual.pooling or ("last" if causal else "mean")
        return Pooler(pooling, normalize, self.dimensions or width, causal, usual.layers)


@dataclass
class Pooler:
    """One text's vector in the making. Sums are in f64, in the order of the tokens, so that they do not depend on how
    steps cut the text."""

    pooling: Pooling
    normalize: bool
    dimensions: int
    causal: bool = True
    layers: tuple[Dense, ...] = ()
    _sum: Array | None = None
    _count: int = 0

    def first(self, tokens: int) -> int:
        """The position from which on states are wanted, of a text of so many tokens."""
        return tokens - 1 if self.pooling == "last" else 0

    def begin(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Forgets what it has taken, and says which tokens to compute: no later one changes a decoder's first state."""
        self._sum, self._count = None, 0
        return ids[:1] if self.pooling == "cls" and self.causal else ids

    def take(self, states: Array) -> None:
        """The next wanted tokens' states, f32 [tokens, hidden]."""
        if self._sum is None:
            self._sum = np.zeros(states.shape[1], np.float64)
        if self.pooling == "cls":
            states = states[: 1 - self._count]
        for state in states:
            self._sum += state
        self._count += len(states)

    def vector(self) -> Array | None:
        """f32 [dimensions]; None where a state was not finite."""
        assert self._sum is not None
        found = self._sum / self._count
        with np.errstate(all="ignore"):  # what is not finite is seen below
            for layer in self.layers:
                found = layer(found)
        if not np.isfinite(found).all():
            return None
        found = found[: self.dimensions]
        if self.normalize:
            found /= max(float(np.sqrt(np.square(found).sum())), _LEAST)
        return found.astype(np.float32)


_LEAST = 1e-12
"""What a vector of zeros is divided by."""
NO_STATES = "The device's session gives no hidden states, so nothing can be embedded on it; choose another backend."


def take_states(step: ScheduledStep, states: Array | None, pooler: Callable[[int], Pooler | None]) -> dict[int, str]:
    """Hands the states that a step has given, f32 [tokens, hidden], to the poolers of its sequences, of those that are still
    there; says which sequences fail, where the session has given none."""
    wanting = [part for part in step.sequences if part.embedded[0] < part.embedded[1]]
    if states is None:
        return {part.seq_id: NO_STATES for part in wanting}
    start = 0
    for part in wanting:
        stop = start + part.embedded[1] - part.embedded[0]
        if (own := pooler(part.seq_id)) is not None:
            own.take(states[start:stop])
        start = stop
    return {}


def stacked(outputs: Iterable[RequestOutput]) -> Array:
    """f32 [outputs, dimensions] of requests for embeddings that have ended; EngineError says why there is one missing."""
    found = []
    for output in outputs:
        if output.embedding is None:
            raise EngineError(str(output.outputs[0].stop_reason))
        found.append(output.embedding)
    return np.stack(found) if found else np.zeros((0, 0), np.float32)
