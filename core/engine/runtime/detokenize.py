"""Stage 3: token ids to text, stop strings, and the outputs of a request as they stand."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from ..formats.tokenizer import Detokenizer, Tokenizer
from ..sampling import SamplingParams
from .outputs import CompletionOutput
from .stops import Match, stop_search


@dataclass
class StopReader:
    """Turns tokens into text and finds the stop strings in it; keeps nothing that grows with the text."""

    params: SamplingParams
    detokenizer: Detokenizer
    tokens: int = 0
    place: int = 0

    def __post_init__(self) -> None:
        self._search = stop_search(tuple(self.params.stop))

    def push(self, token: int, is_stop: bool) -> tuple[str, Match | None]:
        """What the next token adds to the text, and the stop string that is whole with it; none is looked for in the text
        of an ``is_stop`` token, which adds it only with ``include_stop_str_in_output``."""
        self.tokens += 1
        if is_stop and not self.params.include_stop_str_in_output:
            return "", None
        piece, match = self._read(self.detokenizer.push(token))
        return piece, None if is_stop else match

    def flush(self) -> tuple[str, Match | None]:
        """The same of what the detokenizer still held."""
        return self._read(self.detokenizer.flush())

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return self._search.held(self.place)

    def copy(self) -> StopReader:
        other = copy(self)
        other.detokenizer = self.detokenizer.copy()
        return other

    def _read(self, piece: str) -> tuple[str, Match | None]:
        if not self.params.stop:
            return piece, None
        self.place, match = self._search.read(self.place, piece)
        return piece, match if self.tokens > self.params.min_tokens else None


@dataclass
class Continuation:
    """One sequence's text in the making. Text that may be the beginning of a stop string is held back from streaming."""

    index: int
    params: SamplingParams
    reader: StopReader | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, float]] = field(default_factory=list)
    cumulative: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    ranked: bool = False

    def push(self, token: int, logprobs: Mapping[int, float] | None, is_stop: bool) -> bool:
        """Take the next token; ``is_stop`` tokens end the text, and add to it only with
        ``include_stop_str_in_output``. True when a stop string ended it."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative += logprobs[token]
        return self.reader is not None and self._grow(*self.reader.push(token, is_stop))

    def end(self, reason: str, why: str | int | None) -> None:
        """The scheduler's side ended it. What the detokenizer still held comes out, unless it is the part of a character that
        the text was cut in."""
        if self.finish_reason is not None:
            return
        if reason != "length" and self.reader is not None and self._grow(*self.reader.flush()):
            return
        self.finish_reason, self.stop_reason = reason, why

    def _grow(self, piece: str, match: Match | None) -> bool:
        before = len(self.text)
        self.text += piece
        if match is None:
            return False
        start, stop = match
        end = before + start + (len(stop) if self.params.include_stop_str_in_output else 0)
        self.text = self.text[:end]
        self.finish_reason, self.stop_reason = "stop", stop
        return True

    @property
    def shown(self) -> str:
        """The text that later tokens cannot take back."""
        if self.finish_reason is not None or self.reader is None:
            return self.text
        return self.text[: len(self.text) - self.reader.held]

    def output(self) -> CompletionOutput:
        wanted = self.params.logprobs is not None
        return CompletionOutput.growing(
            self.token_ids,
            self.logprobs if wanted else None,
            self.finish_reason,
            index=self.index,
            text=self.shown,
            cumulative_logprob=self.cumulative if wanted or self.ranked else None,
            stop_reason=self.stop_reason,
        )


def stop_reader(params: SamplingParams, tokenizer: Tokenizer) -> StopReader:
    return StopReader(params, tokenizer.detokenizer(skip_special=params.skip_special_tokens))


def continuation(index: int, params: SamplingParams, tokenizer: Tokenizer | None, ranked: bool = False) -> Continuation:
    reader = None if tokenizer is None else stop_reader(params, tokenizer)
    return Continuation(index, params, reader, ranked=ranked)
