"""Measuring a case of ``engine bench``: what goes into the cache before, what is timed, and which tokens count."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import numpy as np

from engine import LLM, RequestOutput, SamplingParams
from engine.errors import RequestError


@dataclass(frozen=True)
class Case:
    """``batch`` sequences, each with ``depth`` tokens in the cache, then ``prompt`` tokens, then ``decode``."""

    batch: int
    depth: int
    prompt: int
    decode: int

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end: what is cached, the token that decoding starts from, what it gives."""
        return self.depth + self.prompt + 1 + self.decode + 1

    def tokens(self, block_size: int) -> int:
        """Room that all sequences take in the KV pool, in tokens of whole blocks."""
        return self.batch * ceil(self.context / block_size) * block_size


@dataclass(frozen=True)
class Result:
    """Tokens a second of each repetition; empty where a side is not measured, ``skipped`` says why a case is not."""

    case: Case
    prefill: Sequence[float] = ()
    decode: Sequence[float] = ()
    skipped: str | None = None

    @property
    def requests_a_second(self) -> float | None:
        """Of ``batch`` requests with this prompt and this many tokens to generate, all at once, by the medians of what was
        measured; None where a side was not."""
        case = self.case
        sides = ((case.prompt, self.prefill), (case.decode, self.decode))
        if any(tokens and not rates for tokens, rates in sides):
            return None
        return 1 / sum(tokens / statistics.median(rates) for tokens, rates in sides if tokens)

    def as_json(self) -> dict[str, Any]:
        found = {**asdict(self.case), "prefill_tok_s": _spread(self.prefill), "decode_tok_s": _spread(self.decode)}
        found["requests_s"] = self.requests_a_second
        return found if self.skipped is None else {**found, "skipped": self.skipped}


def _spread(rates: Sequence[float]) -> dict[str, float] | None:
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)} if rates else None


class Bench:
    """Runs cases on a loaded model. Contexts are put into the cache by earlier requests and found there as prefixes."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loaded = llm.loaded
        self._block_size = llm.loaded.config.block_size
        self._fresh = np.random.default_rng()

    def refusal(self, case: Case) -> str | None:
        """None, or a sentence that says why the case cannot run."""
        what = f"Batch {case.batch} at depth {case.depth} is left out: it"
        if case.context > self._loaded.max_model_len:
            return f"{what} needs {case.context} tokens a sequence, and the context holds {self._loaded.max_model_len}."
        groups = self._loaded.memory.groups
        kept = [group for group in groups if group.window is None] or groups
        held = (min(group.blocks for group in kept) - 1) * self._block_size
        if case.tokens(self._block_size) > held:
            return f"{what} needs {case.tokens(self._block_size)} tokens of KV cache, and the memory holds {held}."
        return None

    def measure(self, case: Case, repetitions: int, refusal: str | None) -> Result:
        """The case's rates, the first of 1 + ``repetitions`` runs left out."""
        if refusal is not None:
            return Result(case, skipped=refusal)
        depths = [self._depth_tokens(n, case.depth) for n in range(case.batch)]
        if case.depth:
            self._run(depths, 1)
        prefill, decode = [], []
        for _ in range(1 + repetitions):
            # Fresh tokens each time: what the last run left in the cache must not be found.
            prompts = [ids + self._random(case.prompt, self._fresh) for ids in depths]
            if case.prompt:
                prefill.append(self._prefill_rate(case, prompts))
            if case.decode:
                decode.append(self._decode_rate(case, prompts))
        return Result(case, prefill[1:], decode[1:])

    def _prefill_rate(self, case: Case, prompts: list[list[int]]) -> float:
        """From submission to the last sequence's first token; only tokens that were computed count."""
        outputs = self._run(prompts, 1)
        computed = sum(len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs)
        self._check_cached(case, outputs, case.depth)
        start = min(o.metrics.arrival for o in outputs)
        return computed / (max(_seconds(o.metrics.first_token) for o in outputs) - start)

    def _decode_rate(self, case: Case, prompts: list[list[int]]) -> float:
        """From the first tokens to the last. The cache holds all but one token of each sequence, cut to whole blocks,
        so that all sequences decode from the first step on, and together."""
        cached = (case.depth + case.prompt) // self._block_size * self._block_size
        outputs = self._run([(ids + self._random(1, self._fresh))[: cached + 1] for ids in prompts], case.decode + 1)
        self._check_cached(case, outputs, cached)
        start = max(_seconds(o.metrics.first_token) for o in outputs)
        end = max(_seconds(o.metrics.last_token) for o in outputs)
        return case.batch * case.decode / (end - start)

    def _run(self, prompts: list[list[int]], tokens: int) -> list[RequestOutput]:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        outputs = self._llm.generate(prompts, params)
        for output in outputs:
            if output.outputs[0].finish_reason != "length":
                raise RequestError(f"The benchmark's own request failed: {output.outputs[0].stop_reason}")
        return outputs

    def _check_cached(self, case: Case, outputs: list[RequestOutput], tokens: int) -> None:
        wanted = tokens // self._block_size * self._block_size
        found = min(o.num_cached_tokens for o in outputs)
        if found < min(wanted, case.depth + case.prompt - 1):
            raise RequestError(
                f"Only {found} of {wanted} tokens were found in the cache; the KV pool is too small, or its allocator keeps"
                " no prefixes."
            )

    def _depth_tokens(self, sequence: int, depth: int) -> list[int]:
        """The same for all cases, so that what one case has put into the cache serves the next."""
        return self._random(depth, np.random.default_rng(sequence))

    def _random(self, count: int, rng: np.random.Generator) -> list[int]:
        ids: list[int] = rng.integers(0, self._loaded.program.vocab, count).tolist()
        return ids


def _seconds(time: float | None) -> float:
    assert time is not None, "a request that ended by length has tokens"
    return time
