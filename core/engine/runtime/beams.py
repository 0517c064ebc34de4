"""A beam search on its way: its sequences in the scheduler, and what has come of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..backend.v1 import StepResult
from ..formats.tokenizer import Tokenizer
from ..sampling import SamplingParams
from ..sampling.beam import BeamSearch, BeamSearchParams, Candidates
from ..scheduler import Scheduler, Sequence
from .detokenize import StopReader, stop_reader
from .request import Request


@dataclass
class BeamGroup:
    """The beams of one request go on together: a round is over when each has brought its candidates.

    ``ids``: the sequences of ``search.beams``, in their order.
    """

    search: BeamSearch
    ids: list[int]
    rows: dict[int, Candidates] = field(default_factory=dict)

    def take(self, seq_id: int, result: StepResult, row: int) -> bool:
        """The candidates of one beam; True when they were the last to come. A beam that may take no token has none."""
        ids, logprobs = result.top_ids[row].tolist(), result.top_logprobs[row].tolist()
        self.rows[seq_id] = [pair for pair in zip(ids, logprobs, strict=True) if pair[0] >= 0]
        return len(self.rows) == len(self.ids)

    def advance(self, scheduler: Scheduler, request_id: str, first_id: int) -> tuple[Sequence, ...]:
        """The next round's sequences, new ones from ``first_id`` on; none when the search is over."""
        going = self.search.advance([self.rows[seq_id] for seq_id in self.ids])
        self.rows.clear()
        if not going:
            return ()
        choices = [(self.ids[index], token) for index, token in going]
        beams = scheduler.continue_beams(request_id, choices, first_id)
        self.ids = [beam.seq_id for beam in beams]
        return beams

    def found(self, most: int) -> Iterator[tuple[int, int, float, str | None, str | int | None]]:
        """Each token of the best finished sequences, in order: the sequence, the token, its logprob, and with the last one
        why it ended."""
        for index, hypothesis in enumerate(self.search.finished[:most]):
            beam = hypothesis.beam
            for n, (token, logprob) in enumerate(zip(beam.tokens, beam.logprobs, strict=True), start=1):
                last = n == len(beam.tokens)
                yield index, token, logprob, hypothesis.reason if last else None, hypothesis.why if last else None


def make_search(request: Request, params: BeamSearchParams, max_tokens: int, tokenizer: Tokenizer | None) -> BeamSearch:
    """The search of a request; ``tokenizer`` is for its stop strings. RequestError where it needs too many candidates."""
    reader = None if tokenizer is None else stop_reader(request.params, tokenizer)
    return BeamSearch(params, max_tokens, len(request.stop_ids), _Ending(request.params, request.stop_ids, reader))


class _Ending:
    """Why the output tokens of a beam end it. Of each round's beams the text is kept as far as stop strings need it, so that
    a candidate of the next round costs its one token."""

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int], reader: StopReader | None) -> None:
        self._params, self._stop_ids = params, stop_ids
        self._round: dict[tuple[int, ...], StopReader] = {}
        self._next_round: dict[tuple[int, ...], StopReader] = {}
        if reader is not None and params.stop:
            self._next_round[()] = reader

    def __call__(self, tokens: tuple[int, ...]) -> str | int | None:
        before, token = tokens[:-1], tokens[-1]
        is_stop = token in self._stop_ids
        if is_stop and len(tokens) >= self._params.min_tokens:
            return token
        if before in self._next_round:
            self._round, self._next_round = self._next_round, {}
        if not self._round:  # no stop strings
            return None
        reader = self._round[before].copy()
        _, match = reader.push(token, is_stop)
        if match is not None:
            return match[1]
        self._next_round[tokens] = reader
        return None
