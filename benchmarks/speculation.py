"""What guessed tokens gain, by how many of them are right.

usage: speculation.py MODEL [--guesses 7] [--rounds 5]

One sequence is generated without guesses, and again with guesses of which a given share of the tokens is right, in turn. The
right ones are those of the run without, so the share is not a model's or a text's but what is asked for; how long guesses are,
and when none is made, is left to the engine. "none" makes no guess at all: what it costs that each step waits for the last.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from result import write

from engine import LLM, SamplingParams
from engine.sampling.speculation import PromptLookup

PROMPT, TOKENS = 256, 128
SHARES = (None, 0.0, 0.5, 0.7, 0.8, 0.9, 1.0)


def oracle(text: list[int], share: float | None, rng: np.random.Generator) -> None:
    """Guesses come from here: as long as the engine would make them."""

    def guess(lookup: PromptLookup, token_ids: list[int], most: int) -> tuple[int, ...]:
        if share is None:
            return ()
        if lookup._silent:
            lookup._silent -= 1
            return ()
        at = len(token_ids)
        right = text[at : at + min(most, lookup._length)]
        return tuple(token if rng.random() < share else token ^ 1 for token in right)

    PromptLookup.guess = guess  # type: ignore[method-assign, assignment]


def rate(llm: LLM, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """Tokens a second after the first, and the tokens."""
    (out,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    times = out.metrics
    assert times.first_token is not None and times.last_token is not None
    return (TOKENS - 1) / (times.last_token - times.first_token), out.outputs[0].token_ids


def measure(model: Path, guesses: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng()
    settings: dict[str, Any] = {"backend": "cpu", "threads": threads, "max_model_len": PROMPT + TOKENS}
    found: dict[float | None, list[tuple[float, float]]] = {share: [] for share in SHARES}
    tokens: dict[float | None, list[float]] = {share: [] for share in SHARES}
    with LLM(model, **settings) as plain, LLM(model, speculate=guesses, **settings) as guessing:
        for number in range(rounds + 1):
            prompt = rng.integers(100, plain.loaded.program.vocab, PROMPT).tolist()
            for share in SHARES:
                alone, ids = rate(plain, prompt)
                oracle([*prompt, *ids], share, rng)
                steps = guessing.engine.health().steps
                with_guesses, same = rate(guessing, prompt)
                assert same == ids, "guesses have changed the tokens"
                if number:  # the first round warms up
                    found[share].append((alone, with_guesses))
                    tokens[share].append(TOKENS / (guessing.engine.health().steps - steps))
    return [
        {
            "right": share,
            "tokens_a_step": statistics.median(tokens[share]),
            "plain_tok_s": statistics.median(alone for alone, _ in runs),
            "tok_s": statistics.median(rate for _, rate in runs),
            "gain": statistics.median(rate / alone for alone, rate in runs),
        }
        for share, runs in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--guesses", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    cases = measure(given.model, given.guesses, given.threads, given.rounds)
    for case in cases:
        print(case)
    common = {"model": given.model.name, "threads": given.threads, "guesses": given.guesses, "rounds": given.rounds}
    print(write("speculation", {**common, "cases": cases}))


if __name__ == "__main__":
    main()
