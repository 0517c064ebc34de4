"""Sampling by its definitions, worked out here from the raw logits of each position."""

from __future__ import annotations

import numpy as np
import pytest
from session_logits import load_for_logits, logits

from engine import SamplingParams
from engine.ops.head import gumbel

PROMPT = [1, 30, 41, 52, 30, 63, 30]
COUNT = 20


@pytest.fixture(scope="module")
def raw_logits(llama):
    """raw_logits(backend, ids) -> f32 [len(ids), V]."""
    loaded = {}

    def get(backend, ids):
        if backend not in loaded:
            loaded[backend] = load_for_logits(llama, backend)
        return logits(loaded[backend], ids, [len(ids)])

    return get


@pytest.fixture
def sampled(llm, backend, raw_logits):
    """sampled(params) -> the output, and for each of its tokens (all tokens before it, its raw logits)."""

    def run(**params):
        params = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | params
        out = llm.generate(PROMPT, SamplingParams(**params))[0].outputs[0]
        ids = [*PROMPT, *out.token_ids]
        rows = raw_logits(backend, ids)[len(PROMPT) - 1 : -1]
        return out, [(ids[: len(PROMPT) + n], row.astype(np.float64)) for n, row in enumerate(rows)]

    return run


def log_softmax(row):
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def penalized(past, row, repetition=1.0, frequency=0.0, presence=0.0):
    """OpenAI's definition of the last two over the output, CTRL's of the first over everything."""
    row = row.copy()
    for token in set(past):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    output = past[len(PROMPT) :]
    for token in set(output):
        row[token] -= frequency * output.count(token) + presence
    return row


def test_greedy_takes_the_best(sampled):
    out, steps = sampled()
    assert list(out.token_ids) == [int(row.argmax()) for _, row in steps]


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4},
    ],
)
def test_penalties(sampled, penalties):
    out, steps = sampled(**penalties)
    short = {name.removesuffix("_penalty"): value for name, value in penalties.items()}
    assert list(out.token_ids) == [int(penalized(past, row, **short).argmax()) for past, row in steps]
    assert list(out.token_ids) != list(sampled()[0].token_ids), "the penalty changed nothing here"


def test_logit_bias_adds_and_bans(sampled):
    plain = sampled()[0].token_ids
    bias = {plain[0]: -np.inf, plain[4]: -3.0, 17: 2.5}
    out, steps = sampled(logit_bias=bias)
    biased = [
        row + sum((np.eye(len(row))[t] * (b if np.isfinite(b) else -1e9) for t, b in bias.items())) for _, row in steps
    ]
    assert list(out.token_ids) == [int(row.argmax()) for row in biased]
    assert plain[0] not in out.token_ids


def test_banning_everything_fails_the_request_alone(llm):
    ban = SamplingParams(logit_bias={t: -np.inf for t in range(320)}, temperature=0.0)
    good = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.generate([PROMPT, PROMPT], [ban, good])
    failed = outputs[0].outputs[0]
    assert failed.finish_reason == "error" and failed.token_ids == ()
    assert "No token is left to choose" in failed.stop_reason
    assert outputs[1].outputs == llm.generate(PROMPT, good)[0].outputs


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_temperature_and_seed_by_the_gumbel_maximum(sampled, temperature):
    seed = 0x1234_5678_9ABC
    out, steps = sampled(temperature=temperature, seed=seed)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    for token, (past, row) in zip(out.token_ids, steps, strict=True):
        assert token == int((row / temperature + gumbel(key, len(past), np.uint32(0), len(row))).argmax())


def test_top_k(sampled):
    out, steps = sampled(temperature=5.0, seed=1, top_k=3)
    ranks = [int((row > row[token]).sum()) for token, (_, row) in zip(out.token_ids, steps, strict=True)]
    assert max(ranks) < 3 and len(set(ranks)) == 3


def test_top_k_of_one_is_greedy(sampled):
    assert sampled(temperature=2.0, seed=4, top_k=1)[0].token_ids == sampled()[0].token_ids


def test_top_p(sampled):
    out, steps = sampled(temperature=1.3, seed=2, top_p=0.6)
    for token, (_, row) in zip(out.token_ids, steps, strict=True):
        probabilities = np.exp(log_softmax(row / 1.3))
        assert probabilities[probabilities > probabilities[token]].sum() < 0.6 + 1e-5
    assert len({int((row > row[t]).sum()) for t, (_, row) in zip(out.token_ids, steps, strict=True)}) > 1


def test_min_p(sampled):
    out, steps = sampled(temperature=1.3, seed=3, min_p=0.2)
    for token, (_, row) in zip(out.token_ids, steps, strict=True):
        probabilities = np.exp(log_softmax(row / 1.3))
        assert probabilities[token] >= 0.2 * probabilities.max() * (1 - 1e-5)
    assert list(out.token_ids) != [int(row.argmax()) for _, row in steps]


@pytest.mark.parametrize("want", [0, 1, 5, 32])
def test_logprobs_are_of_the_raw_logits(sampled, want):
    """Neither temperature nor penalties nor bias touch them."""
    params = {"temperature": 1.4, "seed": 8, "repetition_penalty": 1.3, "logit_bias": {9: 1.0}, "top_k": 50}
    out, steps = sampled(**params, logprobs=want)
    assert len(out.logprobs) == COUNT
    for token, given, (_, row) in zip(out.token_ids, out.logprobs, steps, strict=True):
        expected = log_softmax(row)
        best = np.argsort(-expected)[:want].tolist()
        assert list(given) == [token, *(t for t in best if t != token)]
        for other, logprob in given.items():
            assert abs(logprob - expected[other]) < 2e-4
    total = sum(given[t] for t, given in zip(out.token_ids, out.logprobs, strict=True))
    assert out.cumulative_logprob == pytest.approx(total)
    assert sampled(**params)[0].logprobs is None
    assert sampled(**params)[0].token_ids == out.token_ids


def test_many_draws_follow_the_distribution(llm, backend, raw_logits):
    """The first token of 1024 samples against its probability: a chi-square of the eight likeliest and the rest."""
    row = raw_logits(backend, PROMPT)[-1].astype(np.float64)
    probabilities = np.exp(log_softmax(row))
    outputs = llm.generate(PROMPT, SamplingParams(n=1024, max_tokens=1, seed=99, ignore_eos=True))[0].outputs
    drawn = np.bincount([out.token_ids[0] for out in outputs], minlength=len(row))
    best = np.argsort(-probabilities)[:8]
    expected = 1024 * np.append(probabilities[best], 1 - probabilities[best].sum())
    observed = np.append(drawn[best], 1024 - drawn[best].sum())
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 26.1, "more than 99.9 % of right samplers have less"
