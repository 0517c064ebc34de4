"""Beam search on the host: which candidates go on, which are finished, and when to end.

Token by token it is what transformers' ``generate`` does: the best candidates of all beams are ranked by their summed
logprobs; those that end enter the finished ones if they rank among the first ``beam_width``, with their sum divided by
length ** length_penalty (Wu et al. 2016, "Google's Neural Machine Translation System", has the idea).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from heapq import nsmallest
from typing import Any

from ..errors import RequestError
from .params import SamplingParams, plain_number

MAX_BEAM_WIDTH = 64
MAX_CANDIDATES = 256
"""Of a row: what the device has room for."""

Candidates = Sequence[tuple[int, float]]
"""Of one beam: tokens with their processed logprobs, best first."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Names are vLLM's and transformers'; what has the name of one of ``SamplingParams`` means the same.

    ``num_return_sequences`` None returns all ``beam_width`` of them. They come best first, by their
    ``cumulative_logprob`` / number of tokens ** ``length_penalty``. ``early_stopping``: True ends with the first
    ``beam_width`` finished beams; False once the best running one, as it stands, could not enter them; "never" once it
    could not at any length. Penalties apply to logprobs, not to logits. A stop string ends a beam as a stop token does.
    Width 1 is greedy search on the logits.
    """

    beam_width: int = 4
    max_tokens: int | None = 16
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, plain_number(getattr(self, each.name)))
        _check_count("beam_width", self.beam_width, MAX_BEAM_WIDTH)
        if self.num_return_sequences is not None:
            _check_count("num_return_sequences", self.num_return_sequences, self.beam_width)
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -32 <= penalty <= 32:
            raise RequestError(f"length_penalty is {penalty!r}; it must be a number from -32 to 32.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(f'early_stopping is {self.early_stopping!r}; it must be True, False or "never".')
        self.sampling()

    def sampling(self) -> SamplingParams:
        """What each row of a beam asks of the head; n is the number of sequences to return."""
        own = {"beam_width", "length_penalty", "early_stopping", "num_return_sequences"}
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        return SamplingParams(n=self.num_return_sequences or self.beam_width, temperature=0.0, **shared)

    def candidates(self, stop_ids: int) -> int:
        """How many candidates of a beam to look at: enough for ``beam_width`` beams to go on where ``stop_ids`` tokens
        may end them. RequestError where these are too many."""
        count = max(2, 1 + stop_ids) * self.beam_width
        if count > MAX_CANDIDATES:
            raise RequestError(
                f"A beam width of {self.beam_width} with {stop_ids} tokens that end a sequence needs {count} candidates, "
                f"and at most {MAX_CANDIDATES} are possible; lower the width, or give fewer stop_token_ids."
            )
        return count


def _check_count(name: str, value: Any, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise RequestError(f"{name} is {value!r}; it must be an integer from 1 to {high}.")


@dataclass(frozen=True)
class Beam:
    """Output tokens with the logprob of each, and their sum."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def grown(self, token: int, total: float) -> Beam:
        return Beam((*self.tokens, token), (*self.logprobs, total - self.total), total)


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam. ``reason`` and ``why`` are a CompletionOutput's finish_reason and stop_reason."""

    beam: Beam
    score: float
    reason: str
    why: str | int | None


Ending = Callable[[tuple[int, ...]], str | int | None]
"""The stop token or stop string that output tokens end with, or None."""


class BeamSearch:
    """One request's search. ``beams`` are running, best first; ``finished`` hypotheses, best first."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, stop_ids: int, ending: Ending) -> None:
        self.beams = [Beam()]
        self.finished: list[Hypothesis] = []
        self.candidates = params.candidates(stop_ids)
        self._params = params
        self._max_tokens = max_tokens
        self._ending = ending

    def advance(self, rows: Sequence[Candidates]) -> list[tuple[int, int]]:
        """Takes each running beam's candidates. Returns the beams that go on as (index of the old beam, token), or []
        when the search is over."""
        width = self._params.beam_width
        ranked = nsmallest(
            self.candidates,
            (
                (-(beam.total + logprob), index, token)
                for index, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
                for token, logprob in row
            ),
        )
        going: list[tuple[int, int]] = []
        beams: list[Beam] = []
        for rank, (negated, index, token) in enumerate(ranked):
            if rank >= width and len(going) == width:
                break
            beam = self.beams[index].grown(token, -negated)
            why = self._ending(beam.tokens)
            if why is None and len(beam.tokens) < self._max_tokens:
                going.append((index, token))
                beams.append(beam)
            elif rank < width:
                self._finish(beam, "length" if why is None else "stop", why)
        self.beams = beams
        return going if self._goes_on() else []

    def _finish(self, beam: Beam, reason: str, why: str | int | None) -> None:
        score = beam.total / float(len(beam.tokens)) ** self._params.length_penalty
        self.finished.append(Hypothesis(beam, score, reason, why))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self._params.beam_width :]

    def _goes_on(self) -> bool:
        """Whether a running beam may still enter the finished ones."""
        if not self.beams or len(self.finished) < self._params.beam_width:
            return bool(self.beams)
        if self._params.early_stopping is True:
            return False
        penalty = float(self._params.length_penalty)
        longest = self._params.early_stopping == "never" and penalty > 0
        length = self._max_tokens if longest else len(self.beams[0].tokens)
        best: float = self.beams[0].total / length**penalty
        return best > self.finished[-1].score
