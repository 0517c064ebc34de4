"""Logprobs of answers, in the forms of OpenAI's chats and of its older completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from engine.formats.tokenizer import Tokenizer
from engine.runtime.outputs import CompletionOutput

Logprobs = Mapping[int, float]


def shown_tokens(completion: CompletionOutput) -> int:
    """How many tokens belong to the text: the one that ends a sequence does not."""
    ended = completion.finish_reason == "stop" and isinstance(completion.stop_reason, int)
    return completion.num_tokens - ended


def token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, completion: CompletionOutput, start: int, best: int) -> dict[str, Any] | None:
    """Of a chat's tokens from ``start`` on, each with its ``best`` alternatives; None where none are asked for."""
    tokens, logprobs = completion.since(start)
    if logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token, skip_special=False)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}

    content = []
    for token, known in islice(zip(tokens, logprobs, strict=True), shown_tokens(completion) - start):
        top = [entry(*pair) for pair in _best(known, best)]
        content.append({**entry(token, known[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where the text of each token begins, in characters from ``at`` on, which may lie before the text; tokens of one
    character begin where it does."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, continuation: bool, at: int = 0) -> None:
        self._pieces = tokenizer.detokenizer(continuation, skip_special)
        self.at = at

    def take(self, token: int) -> int:
        start = max(self.at, 0)
        self.at += len(self._pieces.push(token))
        return start


def text_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], known: Sequence[Logprobs | None], best: int, offsets: TextOffsets
) -> dict[str, list[Any]]:
    """Of plain completions, in OpenAI's older form: the best are by their texts, of which one may be several tokens', and
    with them is always the token itself."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for token, logprobs in zip(ids, known, strict=True):
        tokens.append(token_text(tokenizer, token))
        if logprobs is None:
            chosen.append(None)
            top.append(None)
            continue
        own = _finite(logprobs[token])
        found: dict[str, float] = {}
        for other, logprob in _best(logprobs, best):
            found.setdefault(token_text(tokenizer, other), _finite(logprob))
        chosen.append(own)
        top.append(found | {tokens[-1]: own})
    begins = [offsets.take(token) for token in ids]
    return {"tokens": tokens, "text_offset": begins, "token_logprobs": chosen, "top_logprobs": top}


def _best(known: Logprobs, count: int) -> list[tuple[int, float]]:
    return sorted(known.items(), key=lambda pair: -pair[1])[:count]


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's answers have -9999 in its place."""
    return max(logprob, -9999.0)
