"""Stage 3: token ids to text, stop strings, and the outputs of a request as they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..formats.tokenizer import Detokenizer, Tokenizer
from ..sampling import SamplingParams
from .outputs import CompletionOutput


@dataclass
class Continuation:
    """One sequence's text in the making. Text that may be the beginning of a stop string is held back from streaming."""

    index: int
    params: SamplingParams
    detokenizer: Detokenizer | None
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
        if self.detokenizer is None:
            return False
        if is_stop:
            if self.params.include_stop_str_in_output:
                self.text += self.detokenizer.push(token)
            return False
        return self._grow(self.detokenizer.push(token))

    def end(self, reason: str, why: str | int | None) -> None:
        """The scheduler's side ended it. What the detokenizer still held comes out, unless it is the part of a character that
        the text was cut in."""
        if self.finish_reason is not None:
            return
        if reason != "length" and self.detokenizer is not None and self._grow(self.detokenizer.flush()):
            return
        self.finish_reason, self.stop_reason = reason, why

    def _grow(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        if not piece or len(self.token_ids) <= self.params.min_tokens:
            return False
        found = [(self.text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in self.params.stop]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(-1, ""))
        if at < 0:
            return False
        self.text = self.text[: at + len(stop)] if self.params.include_stop_str_in_output else self.text[:at]
        self.finish_reason, self.stop_reason = "stop", stop
        return True

    @property
    def shown(self) -> str:
        """The text that later tokens cannot take back."""
        if self.finish_reason is not None or not self.params.stop:
            return self.text
        held = max(_overlap(self.text, stop) for stop in self.params.stop)
        return self.text[: len(self.text) - held]

    def output(self) -> CompletionOutput:
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            self.index,
            self.shown,
            tuple(self.token_ids),
            self.cumulative if wanted or self.ranked else None,
            tuple(self.logprobs) if wanted else None,
            self.finish_reason,
            self.stop_reason,
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def continuation(index: int, params: SamplingParams, tokenizer: Tokenizer | None, ranked: bool = False) -> Continuation:
    detokenizer = None if tokenizer is None else tokenizer.detokenizer(skip_special=params.skip_special_tokens)
    return Continuation(index, params, detokenizer, ranked=ranked)
