"""Tokens that are guessed change none that come; they only come in fewer steps."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models

from engine import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from engine.errors import ConfigError
from engine.runtime.speculation import Speculation
from engine.sampling.speculation import PromptLookup

REPEATING = [1, *range(40, 60), *range(40, 55)]
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 11, "top_p": 0.95, "top_k": 40},
    "three samples": {"temperature": 1.0, "seed": 5, "n": 3},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "no n-gram twice": {"temperature": 0.0, "no_repeat_ngram_size": 3},
    "two tokens alone": {"temperature": 1.0, "seed": 3, "logit_bias": {50: 90.0, 51: 90.0}},
    "scored": {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 3},
}


def params(**given):
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "logprobs": 1, **given})


def told(outputs):
    return [(out.prompt_logprobs, out.outputs) for out in outputs]


@pytest.fixture(scope="module", params=["cpu", "reference"])
def pair(request, open_llm):
    """The same engine without guesses, and with them."""
    return open_llm(request.param), open_llm(request.param, speculate=6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_and_their_logprobs_stay(pair, kind):
    prompts = [REPEATING, [1, 7, 8, 9], REPEATING[:22]]
    plain, guessing = (told(llm.generate(prompts, params(**KINDS[kind]))) for llm in pair)
    assert guessing == plain


class Oracle:
    """Guesses from known texts, with wrong tokens here and there."""

    def __init__(self, monkeypatch, texts, wrong=0.0):
        self.texts, self.wrong, self.rng, self.made = texts, wrong, np.random.default_rng(), 0
        monkeypatch.setattr(PromptLookup, "guess", lambda _, ids, most: self.guess(list(ids), most))

    def guess(self, ids, most):
        text = next((text for text in self.texts if text[: len(ids)] == ids), ids)
        guess = [t if self.rng.random() >= self.wrong else 7 for t in text[len(ids) : len(ids) + most]]
        self.made += bool(guess)
        return tuple(guess)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "three samples", "penalties"])
def test_right_and_wrong_guesses(open_llm, monkeypatch, kind, wrong):
    plain, guessing = open_llm("cpu"), open_llm("cpu", speculate=6)
    want = plain.generate([REPEATING], params(**KINDS[kind]))
    oracle = Oracle(monkeypatch, [[*REPEATING, *c.token_ids] for c in want[0].outputs], wrong)
    before = guessing.engine.health().steps
    assert told(guessing.generate([REPEATING], params(**KINDS[kind]))) == told(want)
    steps = guessing.engine.health().steps - before
    assert oracle.made
    if wrong == 0.0 and kind != "three samples":  # which share the rows
        assert steps == 1 + -(-39 // 7), "the prompt's step gives a token, each further one seven"


@pytest.mark.parametrize("how", ["token", "string", "length"])
def test_a_text_ends_in_the_midst_of_a_guess(open_llm, monkeypatch, how):
    plain, guessing = open_llm("cpu"), open_llm("cpu", speculate=6)
    (free,) = plain.generate([REPEATING], params(temperature=0.8, seed=2))[0].outputs
    ends = {
        "token": {"stop_token_ids": [free.token_ids[16]]},
        "string": {"stop": [free.text[len(free.text) // 2 :][:3]]},
        "length": {"max_tokens": 18},
    }[how]
    asked = params(temperature=0.8, seed=2, **ends)
    want = plain.generate([REPEATING], asked)
    Oracle(monkeypatch, [[*REPEATING, *free.token_ids]])
    assert told(guessing.generate([REPEATING], asked)) == told(want)
    assert want[0].outputs[0].finish_reason == ("length" if how == "length" else "stop")
    while guessing.engine.scheduler_stats().running:  # the text is searched for strings beside the steps
        time.sleep(0.01)
    assert all(pool.used == 0 for pool in guessing.engine.scheduler_stats().pools)


def test_a_text_ends_just_before_its_greatest_length(open_llm, monkeypatch):
    """Wherever in a guess: nothing holds behind its end."""
    plain, guessing = open_llm("cpu"), open_llm("cpu", speculate=6)
    (free,) = plain.generate([REPEATING], params(temperature=0.8, seed=2))[0].outputs
    Oracle(monkeypatch, [[*REPEATING, *free.token_ids]])
    for at in range(1, 15):
        ends = {"stop_token_ids": [free.token_ids[at]], "max_tokens": at + 2}
        asked = params(temperature=0.8, seed=2, **ends)
        assert told(guessing.generate([REPEATING], asked)) == told(plain.generate([REPEATING], asked))


def test_a_least_length_is_kept_within_a_guess(open_llm, monkeypatch):
    plain, guessing = open_llm("cpu"), open_llm("cpu", speculate=6)
    for seed in range(6):
        few = {"logit_bias": {50: 90.0, 51: 90.0}, "temperature": 1.0, "seed": seed}
        asked = params(**few, stop_token_ids=[50], min_tokens=9)
        want = plain.generate([REPEATING], asked)
        tokens = want[0].outputs[0].token_ids
        assert len(tokens) > 9 and 50 not in tokens[:9]
        Oracle(monkeypatch, [[*REPEATING, *tokens]])
        assert told(guessing.generate([REPEATING], asked)) == told(want)


def test_a_text_fails_where_it_would_have_failed(tmp_path, monkeypatch):
    """Behind its last possible token, though a guess finds out before that has come."""
    tiny_models.write_llama(tmp_path, np.random.default_rng(), max_position_embeddings=512)
    prompt = list(range(tiny_models.VOCAB - 5))
    asked = params(temperature=0.0, no_repeat_ngram_size=1)
    with LLM(tmp_path, backend="cpu") as plain:
        want = plain.generate([prompt], asked)
    (failed,) = want[0].outputs
    assert failed.finish_reason == "error" and len(failed.token_ids) == 5
    oracle = Oracle(monkeypatch, [[*prompt, *failed.token_ids]])
    with LLM(tmp_path, backend="cpu", speculate=6) as guessing:
        assert told(guessing.generate([prompt], asked)) == told(want)
    assert oracle.made


@pytest.mark.parametrize("kind", ["form", "processor", "beams"])
def test_what_the_host_must_see_gets_no_guess(open_llm, monkeypatch, install, kind):
    install("engine.logits_processors", "idle", "idle_ones:make", "make = lambda vocab_size: lambda *told: {}\n")
    plain, guessing = open_llm("cpu"), open_llm("cpu", speculate=6)
    if kind == "beams":
        asked = BeamSearchParams(beam_width=3, max_tokens=12)
        want, run = plain.beam_search([REPEATING], asked), guessing.beam_search
    else:
        form = {"structured_outputs": StructuredOutputs(regex="[ab]{30}")}
        asked = params(temperature=0.5, seed=1, **(form if kind == "form" else {"logits_processors": {"idle": {}}}))
        want, run = plain.generate([REPEATING], asked), guessing.generate
    oracle = Oracle(monkeypatch, [[*REPEATING, *c.token_ids] for c in want[0].outputs])
    assert told(run([REPEATING], asked)) == told(want)
    assert not oracle.made


@pytest.mark.parametrize("allocator", ["paged", "contiguous", "virtual"])
def test_many_in_little_memory(llama, allocator):
    """Sequences with guesses are preempted, and prefixes hit, while others have a form to keep to."""
    form = StructuredOutputs(regex="[ab]{30}")
    few = {50: 90.0, 51: 90.0, 52: 90.0}  # tokens, so that they repeat themselves
    asked = [params(temperature=0.5, seed=n, max_tokens=30 + n, logit_bias=few) for n in range(6)] + [
        params(temperature=0.5, seed=9, structured_outputs=form, ignore_eos=False)
    ]
    prompts = [REPEATING[: 12 + 4 * n] for n in range(6)] + [REPEATING]
    told_by = {}
    for count in (0, 6):
        settings = {"kv_cache_dtype": "f32", "kv_cache_tokens": 160, "max_model_len": 96, "kv_allocator": allocator}
        with LLM(llama, backend="cpu", threads=2, speculate=count, **settings) as llm:
            told_by[count] = told(llm.generate(prompts, asked))
            guesses = llm.engine.speculation()
            assert llm.engine.scheduler_stats().preemptions and (guesses.guessed > 0) == (count > 0)
    assert told_by[0] == told_by[6]


def test_no_guess_holds_behind_a_row_that_failed():
    part = SimpleNamespace(seq_id=3, guessed=3, token_ids=(9, 5, 6, 7))
    step = SimpleNamespace(sequences=[part])
    members = {3: SimpleNamespace(request=SimpleNamespace(stop_ids=()), lookup=None)}
    for status, held in (([0, 0, 0, 0], 3), ([0, 0, 1, 0], 1), ([0, 2, 0, 0], 0), ([1, 0, 0, 0], 0)):
        result = SimpleNamespace(tokens=np.array([5, 6, 7, 8]), status=np.array(status))
        counts = Speculation(3)
        assert counts.check(step, {3: 0}, result, members) == {3: held}
        assert (counts.guessed, counts.held) == (3, held)


def test_rows_are_shared_and_many_sequences_get_no_guess():
    def asked(count):
        sequences = [SimpleNamespace(seq_id=n, token_ids=[1, 2] * 9) for n in range(count)]
        members = {n: SimpleNamespace(lookup=PromptLookup()) for n in range(count)}
        return [len(guess) for guess in Speculation(3).guesses(sequences, members).values()]

    assert [asked(n) for n in (1, 2, 3, 7, 8)] == [[3], [3, 3], [3, 2], [1], []]


@pytest.mark.parametrize("count", [-1, 65])
def test_a_wrong_number_is_refused(llama, count):
    with pytest.raises(ConfigError, match="it must be from 0, which is off, to 64"):
        LLM(llama, backend="cpu", speculate=count)
