"""A request on its way through the stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..sampling import SamplingParams
from ..sampling.grammar import Matcher
from .detokenize import Continuation
from .outputs import RequestMetrics, RequestOutput

Sink = Callable[[RequestOutput], None]


@dataclass
class Request:
    """What a caller asked for, and what has become of it. Stage 3 owns ``continuations``; the step loop the rest.
    ``matchers``: a grammar's state for each continuation, or none."""

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    priority: int
    sink: Sink
    stream: bool
    continuations: list[Continuation]
    stop_ids: frozenset[int]
    matchers: list[Matcher] = field(default_factory=list)
    num_cached: int = 0
    arrival: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.continuations)

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            tuple(c.output() for c in self.continuations),
            self.finished,
            self.num_cached,
            RequestMetrics(self.arrival, self.first_token, self.last_token),
        )
