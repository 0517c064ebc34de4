"""What a request gives back, in vLLM's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..backend.v1 import Array


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. ``logprobs``: for each token the ids that were asked for with their log-probabilities, the chosen
    one included; ``cumulative_logprob`` is the sum of the chosen ones', given where sequences are ranked by it, too.
    ``finish_reason``: None while it runs, then "stop", "length", "abort" or "error"; ``stop_reason`` is the stop string
    or token id that ended it, or the error's sentence."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[Mapping[int, float], ...] | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @classmethod
    def growing(
        cls, token_ids: list[int], logprobs: list[Mapping[int, float]] | None, finish_reason: str | None, **rest: Any
    ) -> CompletionOutput:
        """One of lists that only grow: they are copied, as they are now, when they are asked for, since most outputs of a
        stream are not, and a copy for each token would take more the longer the answer is."""
        made = object.__new__(cls)
        made.__dict__.update(rest, finish_reason=finish_reason, _grow=(token_ids, logprobs, len(token_ids)))
        if logprobs is None:
            made.__dict__["logprobs"] = None
        return made

    @property
    def num_tokens(self) -> int:
        return self.__dict__["_grow"][2] if "_grow" in self.__dict__ else len(self.token_ids)

    def since(self, start: int) -> tuple[Sequence[int], Sequence[Mapping[int, float]] | None]:
        """``token_ids`` and ``logprobs`` from the token ``start`` on: of an answer that grows those that are new, not all."""
        if "_grow" not in self.__dict__:
            return self.token_ids[start:], self.logprobs and self.logprobs[start:]
        token_ids, logprobs, count = self.__dict__["_grow"]
        return token_ids[start:count], None if logprobs is None else logprobs[start:count]

    def __getattr__(self, name: str) -> Any:
        if name not in ("token_ids", "logprobs") or "_grow" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        token_ids, logprobs, count = self.__dict__["_grow"]
        found = self.__dict__[name] = tuple((token_ids if name == "token_ids" else logprobs)[:count])
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds since the epoch of the monotonic clock: arrival, first token, last token."""

    arrival: float
    first_token: float | None
    last_token: float | None


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request: all that it has given so far, not only what is new. ``prompt_logprobs``, where asked for:
    for each prompt token but the first, which has None, its own log-probability and the best ones of its place.
    ``embedding``, f32 [dimensions]: of a request for one, which has an output without tokens, once it is finished.
    ``num_discarded_tokens``: of samples that are none of the outputs, since ``best_of`` made more than ``n``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None = None
    embedding: Array | None = None
    num_discarded_tokens: int = 0

    @property
    def num_generated_tokens(self) -> int:
        return sum(completion.num_tokens for completion in self.outputs) + self.num_discarded_tokens
