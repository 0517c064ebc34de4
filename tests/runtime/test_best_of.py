"""best_of: more samples than are returned, and the best of them."""

from __future__ import annotations

import asyncio

import pytest

from engine import AsyncLLM, SamplingParams
from engine.errors import RequestError

PROMPT = [1, 30, 41, 52, 30]
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 8}


def ranked(llm, count):
    """All samples, the best sum of logprobs first."""
    outputs = llm.generate([PROMPT], SamplingParams(n=count, logprobs=0, **SAMPLED))[0].outputs
    return sorted(outputs, key=lambda c: -c.cumulative_logprob)


def test_the_best_of_the_samples_that_n_would_give(llm):
    every = ranked(llm, 7)
    best = llm.generate([PROMPT], SamplingParams(n=3, best_of=7, **SAMPLED))[0].outputs
    assert [c.index for c in best] == [0, 1, 2]
    for got, want in zip(best, every, strict=False):
        assert (got.token_ids, got.text, got.cumulative_logprob) == (want.token_ids, want.text, want.cumulative_logprob)
        assert got.logprobs is None
    assert len({c.token_ids for c in every}) == 7
    shown = llm.generate([PROMPT], SamplingParams(n=1, best_of=7, logprobs=2, **SAMPLED))[0].outputs[0]
    assert shown.token_ids == every[0].token_ids and len(shown.logprobs[0]) >= 2


def test_best_of_n_is_n(llm):
    same = llm.generate([PROMPT], SamplingParams(n=3, best_of=3, **SAMPLED))[0]
    assert same.outputs == llm.generate([PROMPT], SamplingParams(n=3, **SAMPLED))[0].outputs
    assert list(llm.stream(PROMPT, SamplingParams(n=2, best_of=2, **SAMPLED)))[-1].finished


def test_it_cannot_be_streamed(llm):
    params = SamplingParams(n=1, best_of=2, **SAMPLED)
    for stream in (lambda: list(llm.stream(PROMPT, params)), lambda: llm.generate([PROMPT], params, print)):
        with pytest.raises(RequestError, match="best_of above n and beam search choose at the end"):
            stream()


def test_asynchronously_without_streaming(llm):
    params = SamplingParams(n=1, best_of=4, **SAMPLED)

    async def run():
        return [out async for out in AsyncLLM(llm.engine).generate(PROMPT, params, stream=False)]

    (output,) = asyncio.run(run())
    assert output.finished and output.outputs == llm.generate([PROMPT], params)[0].outputs
