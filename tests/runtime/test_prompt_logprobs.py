"""Prompt logprobs: of each prompt token given those before it, whatever the chunks, the cache and the company."""

from __future__ import annotations

import numpy as np
import pytest
from session_logits import load_for_logits, logits

from engine import SamplingParams
from engine.ops.head import log_softmax

PROMPT = [1, *(20 + 7 * n % 200 for n in range(90))]


@pytest.fixture(scope="module")
def wanted(llama):
    """wanted(backend, ids, k) -> what each entry must be, from the raw logits."""
    loaded = {}

    def get(backend, ids, k):
        if backend not in loaded:
            loaded[backend] = load_for_logits(llama, backend)
        entries = [None]
        for row, token in zip(
            logits(loaded[backend], ids, [len(ids) // 2, len(ids) - len(ids) // 2]), ids[1:], strict=False
        ):
            logprobs = log_softmax(row)
            best = np.argsort(-logprobs, kind="stable")[:k].tolist()
            entries.append({t: logprobs[t] for t in (token, *best)})
        return entries

    return get


def scored(k=None, **params):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "prompt_logprobs": k} | params))


def check(output, entries):
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(entries)
    for got, want in zip(output.prompt_logprobs[1:], entries[1:], strict=True):
        assert list(got) == list(want)
        np.testing.assert_allclose(list(got.values()), list(want.values()), atol=2e-4)


@pytest.mark.parametrize("k", [0, 1, 5, 32])
def test_each_token_of_the_prompt(llm, backend, wanted, k):
    output = llm.generate([PROMPT], scored(k))[0]
    check(output, wanted(backend, PROMPT, k))
    plain = llm.generate([PROMPT], scored())[0]
    assert plain.prompt_logprobs is None
    assert plain.outputs == output.outputs


def test_short_prompts(llm, backend, wanted):
    one, two = llm.generate([[5], [5, 9]], scored(2))
    assert one.prompt_logprobs == (None,)
    check(two, wanted(backend, [5, 9], 2))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 128},
        {"max_num_seqs": 2, "max_num_batched_tokens": 40, "max_model_len": 128, "block_size": 4},
        {"kv_cache_tokens": 144, "max_model_len": 128},
    ],
)
def test_chunks_hits_and_preemption_change_nothing(open_llm, backend, llm, settings):
    """Bitwise, with more tokens than rows, a warm cache, samples beside, and too little memory."""
    small = open_llm(backend, **settings)
    prompts = [PROMPT, PROMPT, PROMPT[:50], PROMPT[:17], PROMPT]
    params = [scored(3), scored(3, n=2), scored(0), scored(), scored(3, logprobs=2, repetition_penalty=1.3)]
    together = small.generate(prompts, params)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        alone = llm.generate([prompt], one)[0]
        assert output.prompt_logprobs == alone.prompt_logprobs
        assert output.outputs == alone.outputs
    assert len(PROMPT) > small.engine.loaded.plan.limits.dims.R
    assert all(pool.used == 0 for pool in small.engine.scheduler_stats().pools)


def test_cached_tokens_are_computed_again(llm):
    llm.generate([PROMPT], scored())
    assert llm.generate([PROMPT], scored())[0].num_cached_tokens > 0
    again = llm.generate([PROMPT], scored(1))[0]
    assert again.num_cached_tokens == 0 and None not in again.prompt_logprobs[1:]


def test_streamed_from_the_first_output_on(llm):
    outputs = list(llm.stream(PROMPT, scored(1)))
    assert len(outputs) == 6 and all(output.prompt_logprobs == outputs[0].prompt_logprobs for output in outputs)
    assert None not in outputs[0].prompt_logprobs[1:]
