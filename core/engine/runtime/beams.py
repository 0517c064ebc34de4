"""A beam search on its way: its sequences in the scheduler, and what has come of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..backend.v1 import StepResult
from ..formats.tokenizer import Tokenizer
from ..sampling.beam import BeamSearch, BeamSearchParams, Candidates, Ending
from ..scheduler import Scheduler, Sequence
from .detokenize import continuation
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


def make_search(request: Request, params: BeamSearchParams, max_tokens: int, tokenizer: Tokenizer | None) -> BeamSearch:
    """The search of a request; ``tokenizer`` is for its stop strings. RequestError where it needs too many candidates."""
    return BeamSearch(params, max_tokens, len(request.stop_ids), _ending(request, tokenizer))


def _ending(request: Request, tokenizer: Tokenizer | None) -> Ending:
    params, stops = request.params, request.stop_ids

    def ending(tokens: tuple[int, ...]) -> str | int | None:
        if tokens[-1] in stops and len(tokens) >= params.min_tokens:
            return tokens[-1]
        if not params.stop:
            return None
        text = continuation(0, params, tokenizer)
        stopped = any(text.push(token, None, token in stops) for token in tokens)
        return text.stop_reason if stopped else None

    return ending
