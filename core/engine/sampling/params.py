"""What a request asks of sampling, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from ..errors import RequestError
from .structured import StructuredOutputs

MAX_LOGPROBS = 32
MAX_SEED = 2**64
MAX_BIAS = 1e9
MAX_STOPS = 1024
MAX_STOP_CHARACTERS = 1024  # of one, and of all:
MAX_ALL_STOP_CHARACTERS = 8192
MIN_TEMPERATURE = 1e-5
"""Below it logits would overflow, and the best token is certain: it counts as 0."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Names and meanings are vLLM's, and transformers' where vLLM has none. ``temperature`` 0 is greedy; ``top_k`` 0 or -1,
    ``top_p`` 1, ``min_p`` 0, ``typical_p`` 1 and ``no_repeat_ngram_size`` 0 are off.

    Processors run in this order: logit bias and ``logits_processors``, repetition penalty, no-repeat n-gram, frequency
    and presence penalties, temperature, top-k, top-p, min-p, typical-p. ``logprobs`` and ``prompt_logprobs`` (how many
    best tokens to report with each) are of the model's raw distribution. Without a ``seed`` one is drawn for the
    request. ``max_tokens`` None means up to the context's end.

    Of ``best_of`` samples the ``n`` with the greatest sums of logprobs are returned, best first. ``logits_processors``
    maps names of installed processors (see ``processors.py``) to their parameters. ``structured_outputs`` keeps the text
    to a form and ends it where the form is complete, ``min_tokens`` or not; a text that ``max_tokens`` cuts ("length")
    need not be complete.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, plain_number(getattr(self, each.name)))
        for name, unset in _UNSET:
            if getattr(self, name) is None:
                object.__setattr__(self, name, unset)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        ids = map(plain_number, _listed("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        if isinstance(self.temperature, float) and 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        self._check_counts()
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise RequestError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.", name)
        for name in ("top_p", "typical_p"):
            if getattr(self, name) == 0:
                raise RequestError(f"{name} is 0; it must be above 0, and 1 turns it off.", name)
        # what the caller does with its own mappings afterwards changes nothing here
        object.__setattr__(self, "logit_bias", self._own_bias())
        self._check_bias()
        self._check_processors()
        own = {name: dict(options) for name, options in self.logits_processors.items()}
        object.__setattr__(self, "logits_processors", own)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be true or false.", name)
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise RequestError(
                f"structured_outputs is {self.structured_outputs!r}; it must be a StructuredOutputs.",
                "structured_outputs",
            )
        self._check_stops()

    @property
    def samples(self) -> int:
        """How many continuations are computed."""
        return self.n if self.best_of is None else self.best_of

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"There are {len(self.stop)} stop strings; at most {MAX_STOPS} are taken.", "stop")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError("Every stop string must be a text that is not empty.", "stop")
        lengths = [len(text) for text in self.stop]
        if max(lengths, default=0) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"A stop string has {max(lengths)} characters; it must have {MAX_STOP_CHARACTERS} of them at most.",
                "stop",
            )
        if sum(lengths) > MAX_ALL_STOP_CHARACTERS:
            raise RequestError(
                f"The stop strings have {sum(lengths)} characters; together they must have {MAX_ALL_STOP_CHARACTERS} at most.",
                "stop",
            )

    def _check_processors(self) -> None:
        given = self.logits_processors
        if not isinstance(given, Mapping) or not all(
            isinstance(name, str) and isinstance(options, Mapping) and all(isinstance(key, str) for key in options)
            for name, options in given.items()
        ):
            raise RequestError(
                f"logits_processors is {given!r}; it must map names of processors to their parameters, such as"
                ' {"name": {"parameter": 1}}.',
                "logits_processors",
            )

    def _own_bias(self) -> dict[int, float]:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers.", "logit_bias")
        return {plain_number(token): plain_number(bias) for token, bias in self.logit_bias.items()}

    def _check_bias(self) -> None:
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name):
                if isinstance(token, bool) or not isinstance(token, int):
                    raise RequestError(f"{token!r} is no token id; logit_bias and stop_token_ids take integers.", name)
        for token, bias in self.logit_bias.items():
            number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
            if not number or not (abs(bias) <= MAX_BIAS or bias == -math.inf):
                raise RequestError(
                    f"The logit bias of token {token} is {bias!r}; it must be a number from -{MAX_BIAS:g} to {MAX_BIAS:g},"
                    " or -inf to ban the token.",
                    "logit_bias",
                )

    def _check_counts(self) -> None:
        for name, low, high in _COUNTS:
            value = getattr(self, name)
            if value is None and name in ("best_of", "max_tokens", "seed", "logprobs", "prompt_logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise RequestError(f"{name} is {value!r}; it must be an integer from {low} to {high}.", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).", "min_tokens")
        if self.samples < self.n:
            raise RequestError(
                f"best_of ({self.best_of}) is below n ({self.n}); n are chosen of best_of samples.", "best_of"
            )


_UNSET: tuple[tuple[str, Any], ...] = (
    ("stop", ()),
    ("stop_token_ids", ()),
    ("logit_bias", {}),
    ("logits_processors", {}),
)
"""What None is, as in vLLM."""


def plain_number(value: Any) -> Any:
    """A number of another library, such as NumPy's, as Python's own; anything else as it is."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{name} is {value!r}; it must be a list.", name)
    return tuple(value)


_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("repetition_penalty", 1e-3, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("presence_penalty", -100.0, 100.0),
)
_COUNTS = (
    ("n", 1, 1024),
    ("best_of", 1, 1024),
    ("max_tokens", 1, 1 << 30),
    ("min_tokens", 0, 1 << 30),
    ("top_k", 0, 1 << 30),
    ("no_repeat_ngram_size", 0, 1 << 30),
    ("seed", 0, MAX_SEED - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
