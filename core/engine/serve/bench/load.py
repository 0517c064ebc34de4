"""What is asked, and when: prompts with the lengths of their answers, and times between requests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.console.texts import read_text_file
from engine.errors import UsageError
from engine.formats.tokenizer import Tokenizer

_FIRST_ID = 100  # below it vocabularies have their control tokens


@dataclass(frozen=True)
class Ask:
    """A prompt, as text or as token ids, and how many tokens are to be generated for it."""

    prompt: str | list[int]
    output_tokens: int


def random_asks(rng: np.random.Generator, count: int, lengths: tuple[int, int], spread: float, vocab: int) -> list[Ask]:
    """Random token ids below ``vocab``. ``lengths``: tokens of prompt and answer, each drawn evenly from those that differ
    from it by at most the part ``spread``."""
    if vocab <= _FIRST_ID:
        raise UsageError(f"--vocab is {vocab}; it must be above {_FIRST_ID}.")
    drawn = []
    for length in lengths:
        low, high = max(math.floor(length * (1 - spread)), 1), max(math.ceil(length * (1 + spread)), 1)
        drawn.append(rng.integers(low, high, count, endpoint=True).tolist())
    return [Ask(rng.integers(_FIRST_ID, vocab, prompt).tolist(), output) for prompt, output in zip(*drawn, strict=True)]


def renewed(rng: np.random.Generator, asks: Sequence[Ask], vocab: int) -> list[Ask]:
    """The same lengths with other random token ids, of which a server's prefix cache has none; texts stay."""
    ids = [rng.integers(_FIRST_ID, vocab, len(ask.prompt)).tolist() for ask in asks]
    return [
        replace(ask, prompt=new) if isinstance(ask.prompt, list) else ask for ask, new in zip(asks, ids, strict=True)
    ]


def conversation_asks(
    rng: np.random.Generator, count: int, file: Path, tokenizer: Tokenizer, scale: float, most: int
) -> list[Ask]:
    """First turns of a file in ShareGPT's form, in a random order, with the lengths of their answers times ``scale``; pairs
    of more than ``most`` tokens are left out."""
    pairs = list(_pairs(file))
    asks: list[Ask] = []
    for index in rng.permutation(len(pairs)).tolist():
        if len(asks) == count:
            break
        prompt, answer = pairs[index]
        output = max(round(len(tokenizer.encode(answer)) * scale), 1)
        if len(tokenizer.encode(prompt)) + output <= most:
            asks.append(Ask(prompt, output))
    if len(asks) < count:
        raise UsageError(
            f"{file} has {len(asks)} conversations of at most {most} tokens, and --num-prompts is {count}."
        )
    return asks


def _pairs(file: Path) -> list[tuple[str, str]]:
    """The first words of a person in each conversation, and the answer."""
    try:
        items = json.loads(read_text_file(file))
        turns = [item.get("conversations") or item.get("conversation") or [] for item in items]
        found = [(first["value"], second["value"]) for first, second, *_ in (t for t in turns if len(t) > 1)]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f'{file} is no list of conversations in ShareGPT\'s form, [{{"conversations": [{{"value": "..."}}, ...]}}, ...]:'
            f" {error}."
        ) from error
    return [(str(prompt), str(answer)) for prompt, answer in found if prompt and answer]


def arrivals(rng: np.random.Generator, count: int, rate: float, burstiness: float) -> list[float]:
    """Seconds after the start at which each request is sent: gamma-distributed times between them (``burstiness`` 1 is
    Poisson), which add up to ``count`` / ``rate``; all at once for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps * (count / rate / gaps.sum()))
    return [0.0, *times[:-1].tolist()]
