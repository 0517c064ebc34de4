"""A request on its way through the stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..backend.v1 import Array
from ..sampling import BeamSearchParams, SamplingParams
from ..sampling.grammar import Matcher
from ..sampling.processors import NamedProcessor
from .detokenize import Continuation
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .pooling import Pooler

Sink = Callable[[RequestOutput], None]


class Watch:
    """Is told, on stage 3's thread, when a sequence of a request gets a token, and how it ends. This one does nothing."""

    def token(self, index: int, at: float) -> None: ...

    def ended(self, index: int, at: float, reason: str) -> None: ...


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
    beam: BeamSearchParams | None = None
    ranked: bool = False
    """Whether the sums of logprobs are wanted though the logprobs are not."""
    processors: tuple[NamedProcessor, ...] = ()
    prompt_logprobs: list[Mapping[int, float] | None] | None = None
    """Of each prompt token, filled by the step loop; of the first there is none."""
    pooler: Pooler | None = None
    """Of a request for an embedding, fed by the step loop."""
    embedding: Array | None = None
    salt: bytes = b""
    """Keeps its cached prefix apart from that of requests with another salt."""
    num_cached: int = 0
    num_read: int = 0
    """Tokens of the prompt that steps have computed or the cache had, while it is read."""
    told: Callable[[], None] | None = None
    """Called once the sinks have the outputs of a step, on stage 3's thread, for all requests that have the same."""
    watch: Watch = field(default_factory=Watch)
    arrival: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    """When it was handed to the step loop, if it was."""
    first_token: float | None = None
    last_token: float | None = None

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.continuations)

    @property
    def want(self) -> int:
        """How many best logprobs a token's row gives beside its own, or -1 for none."""
        if self.params.logprobs is not None:
            return self.params.logprobs
        return 0 if self.ranked else -1

    def output(self) -> RequestOutput:
        outputs, discarded = self._chosen(), 0
        if len(outputs) < len(self.continuations):
            discarded = sum(len(c.token_ids) for c in self.continuations) - sum(c.num_tokens for c in outputs)
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            outputs,
            self.finished,
            self.num_cached,
            RequestMetrics(self.arrival, self.first_token, self.last_token),
            self._scores(),
            self.embedding,
            discarded,
        )

    def _chosen(self) -> tuple[CompletionOutput, ...]:
        """The outputs; of more samples than are wanted the best, those that failed last."""
        if len(self.continuations) == self.params.n:
            return tuple(c.output() for c in self.continuations)
        ranked = sorted(self.continuations, key=lambda c: (c.finish_reason in ("error", "abort"), -c.cumulative))
        return tuple(replace(c.output(), index=rank) for rank, c in enumerate(ranked[: self.params.n]))

    def _scores(self) -> tuple[Mapping[int, float] | None, ...] | None:
        if self.prompt_logprobs is None or None in self.prompt_logprobs[1:]:
            return None
        return tuple(self.prompt_logprobs)
