"""Beam search: token by token what transformers finds on stories260K, and an ordinary request in all other ways."""

from __future__ import annotations

import asyncio
import math
import random

import numpy as np
import pytest

from engine import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from engine.errors import RequestError

EOS = 2
PAD = 511
VOCAB = 512


@pytest.fixture(scope="module")
def peer(stories, stories_peer):
    torch, transformers, model = stories_peer
    return torch, model, transformers.AutoTokenizer.from_pretrained(stories / "hf")


@pytest.fixture(scope="module")
def tellers(stories):
    """tellers(backend, file, **settings) -> an LLM over stories260K with an exact cache."""
    opened: dict[tuple, LLM] = {}

    def get(backend, file="hf", **settings):
        key = backend, file, *sorted(settings.items())
        if key not in opened:
            options = {"kv_cache_dtype": "f32", "threads": 2, "kv_cache_tokens": 4096} | settings
            opened[key] = LLM(stories / file, backend=backend, **options)
        return opened[key]

    yield get
    for llm in opened.values():
        llm.close()


FOUND = {}


def generated(peer, prompt, params):
    """transformers' sequences, each up to its end, with their scores (None for greedy search)."""
    key = tuple(prompt), repr(params)
    if key not in FOUND:
        FOUND[key] = _generated(peer, prompt, params)
    return FOUND[key]


def _generated(peer, prompt, params):
    torch, model, tokenizer = peer
    beams = {
        "num_return_sequences": params.num_return_sequences or params.beam_width,
        "length_penalty": float(params.length_penalty),
        "early_stopping": params.early_stopping,
    }
    ends = [EOS, *params.stop_token_ids]
    stopping = {"stop_strings": list(params.stop), "tokenizer": tokenizer} if params.stop else {}
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            repetition_penalty=float(params.repetition_penalty),
            no_repeat_ngram_size=params.no_repeat_ngram_size,
            eos_token_id=ends,
            pad_token_id=PAD,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **(beams if params.beam_width > 1 else {}),
            **stopping,
        )
    found = []
    for sequence in out.sequences[:, len(prompt) :].tolist():
        while sequence[-1] == PAD:
            sequence.pop()
        end = next((n for n, token in enumerate(sequence) if token in ends), len(sequence) - 1)
        found.append(tuple(sequence[: end + 1]))
    return found, None if params.beam_width == 1 else out.sequences_scores.tolist()


def check(peer, prompt, params, output):
    wanted, scores = generated(peer, prompt, params)
    assert [c.token_ids for c in output.outputs] == wanted, (prompt, params)
    if scores is not None:
        got = [c.cumulative_logprob / len(c.token_ids) ** params.length_penalty for c in output.outputs]
        assert got == pytest.approx(scores, rel=1e-4, abs=1e-3)


def random_case(rng):
    prompt = [1] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([0, 0, 3, 9, 30, 70]))]
    width, length = rng.randint(1, 8), rng.randint(1, 30)
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=length,
        min_tokens=rng.choice([0, 0, min(length, 4)]),
        length_penalty=rng.choice([-1.5, -0.3, 0, 0.6, 1, 2.5]),
        early_stopping=rng.choice([False, True, "never"]),
        num_return_sequences=rng.randint(1, width),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        no_repeat_ngram_size=rng.choice([0, 0, 1, 2, 3]),
        # Some of the likeliest tokens, so that beams end at all lengths.
        stop_token_ids=rng.choice([[], [261], [430, 431], [rng.randrange(3, VOCAB), 376]]),
    )
    return prompt, params


def test_the_story_with_penalties(peer, tellers, backend):
    """Four beams, 3-grams and a penalty, for each way to stop and of both formats."""
    for file in ("hf", "stories260K-f32.gguf"):
        llm = tellers(backend, file)
        prompt = llm.get_tokenizer().encode("Once upon a time", add_special=True)
        for stopping in (False, True, "never"):
            params = BeamSearchParams(
                beam_width=4,
                max_tokens=40,
                length_penalty=0.8,
                early_stopping=stopping,
                no_repeat_ngram_size=3,
                repetition_penalty=1.2,
                stop_token_ids=[430],
            )
            check(peer, prompt, params, llm.beam_search([prompt], params)[0])


def test_random_requests_on_the_cpu(peer, tellers, cpu):
    rng = random.Random(int(np.random.default_rng().integers(2**32)))
    for _ in range(12):
        prompt, params = random_case(rng)
        check(peer, prompt, params, tellers(cpu).beam_search([prompt], params)[0])


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}, {"kv_cache_tokens": 160}])
def test_many_at_once_in_any_room_find_the_same(peer, tellers, cpu, settings):
    """Beams beside each other and beside ordinary requests, preempted and in small chunks."""
    llm = tellers(cpu, max_model_len=128, block_size=4, **settings)
    rng = random.Random(int(np.random.default_rng().integers(2**32)))
    wide = BeamSearchParams(beam_width=8, max_tokens=30, early_stopping="never")
    cases = [random_case(rng) for _ in range(4)] + [(list(range(1, 60)), wide)]
    plain = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = [prompt for prompt, _ in cases] * 2
    outputs = llm._run([None] * 10, prompts, [*(params for _, params in cases), *[plain] * 5], None, None)
    for (prompt, params), output in zip(cases, outputs[:5], strict=True):
        check(peer, prompt, params, output)
    for (prompt, _), output in zip(cases, outputs[5:], strict=True):
        assert output.outputs == llm.generate([prompt], plain)[0].outputs
    stats = llm.engine.scheduler_stats()
    assert "kv_cache_tokens" not in settings or stats.preemptions
    assert all(pool.used == 0 for pool in stats.pools)


def test_a_beam_that_may_take_no_token_ends_alone(tellers, backend):
    """After 10 both allowed tokens have come in the prompt; after 11 there is each of them once."""
    bias = {token: -math.inf for token in range(VOCAB) if token not in (10, 11)}
    params = BeamSearchParams(
        beam_width=2, num_return_sequences=1, max_tokens=3, logit_bias=bias, no_repeat_ngram_size=2, ignore_eos=True
    )
    (found,) = tellers(backend).beam_search([[1, 10, 10, 11, 5]], params)[0].outputs
    assert (found.token_ids, found.finish_reason) == ((11, 11, 10), "length")


def test_stop_strings_end_beams(peer, tellers, cpu):
    llm = tellers(cpu)
    prompt = llm.get_tokenizer().encode("Once upon a time", add_special=True)
    for stop in (["little"], ["big", "park"], ["was a"]):
        params = BeamSearchParams(beam_width=3, max_tokens=24, stop=stop, length_penalty=0.5)
        output = llm.beam_search([prompt], params)[0]
        check(peer, prompt, params, output)
        for found in output.outputs:
            assert not any(text in found.text for text in stop)
            assert (found.finish_reason, found.stop_reason in stop) in {("stop", True), ("length", False)}
        assert any(found.stop_reason in stop for found in output.outputs)
        kept = BeamSearchParams(
            beam_width=3, max_tokens=24, stop=stop, length_penalty=0.5, include_stop_str_in_output=True
        )
        for found, whole in zip(output.outputs, llm.beam_search([prompt], kept)[0].outputs, strict=True):
            assert whole.text == found.text + (found.stop_reason or "")


# -- on a tiny random model ------------------------------------------------------------------------------------------

PROMPT = [1, 30, 41, 52]


def test_one_output_at_the_end_best_first(llm):
    params = BeamSearchParams(beam_width=5, max_tokens=7, ignore_eos=True)
    by_text, by_ids = llm.beam_search(["Once", PROMPT], params)
    assert by_text.prompt == "Once" and by_ids.prompt_token_ids == tuple(PROMPT) and by_ids.finished
    found = by_ids.outputs
    assert [c.index for c in found] == [0, 1, 2, 3, 4]
    assert all(len(c.token_ids) == 7 and c.finish_reason == "length" for c in found)
    assert len({c.token_ids for c in found}) == 5
    sums = [c.cumulative_logprob for c in found]
    assert sums == sorted(sums, reverse=True) and sums[0] < 0
    assert found[0].text == llm.get_tokenizer().decode(found[0].token_ids)
    assert found[0].logprobs is None
    assert llm.beam_search([PROMPT], BeamSearchParams(beam_width=5, max_tokens=7, ignore_eos=True))[0].outputs == found


def test_times_are_those_of_the_search(llm):
    metrics = llm.beam_search([[1, 5, 9]], BeamSearchParams(beam_width=3, max_tokens=40))[0].metrics
    steps = metrics.last_token - metrics.first_token
    assert steps > (metrics.last_token - metrics.arrival) / 4


def test_wide_beams_find_the_best_of_all(llm):
    """As wide as the vocabulary allows, two steps of search miss nothing: the sums of the model's own logprobs."""
    params = BeamSearchParams(beam_width=32, max_tokens=2, ignore_eos=True, length_penalty=0)
    found = llm.beam_search([PROMPT], params)[0].outputs[0]
    want = SamplingParams(temperature=0.0, max_tokens=1, logprobs=32, ignore_eos=True)
    first = llm.generate([PROMPT], want)[0].outputs[0].logprobs[0]
    best = {}
    for token, logprob in first.items():
        second = llm.generate([[*PROMPT, token]], want)[0].outputs[0]
        best[token, second.token_ids[0]] = logprob + second.cumulative_logprob
    winner = max(best, key=best.get)
    assert found.token_ids == winner
    assert found.cumulative_logprob == pytest.approx(best[winner], abs=1e-4)


def test_width_one_is_greedy(llm):
    greedy = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.4, logprobs=0))[
        0
    ]
    beam = llm.beam_search([PROMPT], BeamSearchParams(beam_width=1, max_tokens=9, repetition_penalty=1.4))[0]
    assert beam.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert beam.outputs[0].cumulative_logprob == greedy.outputs[0].cumulative_logprob


def test_biases_apply_and_a_dead_end_is_told(llm):
    only = {t: 1000.0 for t in (40, 41)}
    out = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4, logit_bias=only, ignore_eos=True))[0]
    assert {t for c in out.outputs for t in c.token_ids} == {40, 41}
    banned = {t: float("-inf") for t in range(320)}
    dead = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4, logit_bias=banned))[0]
    assert [c.finish_reason for c in dead.outputs] == ["error", "error"]
    assert "No token is left to choose" in dead.outputs[0].stop_reason
    # Two tokens and no bigram twice: the search runs out of tokens, and has nothing finished.
    few = {t: float("-inf") for t in range(320) if t not in (40, 41)}
    params = BeamSearchParams(beam_width=2, max_tokens=30, logit_bias=few, no_repeat_ngram_size=2, ignore_eos=True)
    assert {c.finish_reason for c in llm.beam_search([PROMPT], params)[0].outputs} == {"error"}


def test_an_abort_ends_all_beams(llm, slowly_loaded, backend):
    async def main():
        engine = AsyncLLM(slowly_loaded(backend).engine)
        params = BeamSearchParams(beam_width=4, max_tokens=200, ignore_eos=True)
        task = asyncio.create_task(engine.beam_search(PROMPT, params, request_id="beams"))
        await asyncio.sleep(0.1)
        await engine.abort("beams")
        output = await task
        assert [c.finish_reason for c in output.outputs] == ["abort"] * 4
        cancelled = asyncio.create_task(engine.beam_search(PROMPT, params))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return await engine.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))

    output = asyncio.run(main())
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    assert output.outputs == llm.beam_search([PROMPT], params)[0].outputs


@pytest.fixture
def slowly_loaded(slowly, llama, idle):
    """slowly_loaded(backend) -> an LLM with steps of at least 5 ms, idle and empty after the test."""
    opened = []

    def get(backend):
        opened.append(LLM(llama, backend=backend, threads=2, kv_cache_dtype="f32", kv_cache_tokens=2048))
        return opened[-1]

    yield get
    for llm in opened:
        idle(llm)
        llm.close()


def test_beams_cannot_be_streamed(llm):
    with pytest.raises(RequestError, match="cannot be streamed"):
        llm.engine.submit(None, PROMPT, BeamSearchParams(), print)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"beam_width": 0}, "beam_width is 0; it must be an integer from 1 to 64"),
        ({"beam_width": 2.0}, "beam_width is 2.0"),
        ({"beam_width": 3, "num_return_sequences": 4}, "num_return_sequences is 4; it must be an integer from 1 to 3"),
        ({"early_stopping": "always"}, "early_stopping is 'always'; it must be True, False or \"never\""),
        ({"early_stopping": 1}, "early_stopping is 1"),
        ({"length_penalty": "long"}, "length_penalty is 'long'"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
    ],
)
def test_wrong_parameters_get_a_sentence(wrong, sentence):
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**wrong)
    assert sentence in str(caught.value)


def test_too_many_candidates_are_refused(llm):
    params = BeamSearchParams(beam_width=64, stop_token_ids=list(range(10, 20)), ignore_eos=True)
    with pytest.raises(RequestError, match="needs 704 candidates, and at most 256 are possible"):
        llm.beam_search([PROMPT], params)


def test_parameters_for_each_prompt(llm):
    params = [BeamSearchParams(beam_width=2, max_tokens=n, ignore_eos=True) for n in (3, 6)]
    outputs = llm.beam_search([PROMPT, PROMPT], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 6]
    with pytest.raises(RequestError, match="given 1 times for 2 prompts"):
        llm.beam_search([PROMPT, PROMPT], params[:1])
    with pytest.raises(RequestError, match="of type SamplingParams; here they must be BeamSearchParams"):
        llm.beam_search([PROMPT], SamplingParams())
    with pytest.raises(RequestError, match="of type BeamSearchParams; here they must be SamplingParams"):
        llm.generate([PROMPT], params[0])
