"""Logits processors of an outside distribution: found by name, told all tokens, and no danger to others."""

from __future__ import annotations

import math
import re

import pytest

from engine import BeamSearchParams, SamplingParams
from engine.errors import RequestError

SOURCE = """
import numpy as np

CALLS = []


class Successor:
    '''Allows the last token's successor alone.'''

    def __init__(self, vocab_size, step=1):
        self.vocab_size, self.step = vocab_size, int(step)

    def __call__(self, prompt_ids, output_ids):
        CALLS.append((tuple(prompt_ids), tuple(output_ids)))
        allowed = np.zeros(self.vocab_size, bool)
        allowed[((output_ids or prompt_ids)[-1] + self.step) % self.vocab_size] = True
        return allowed


class Push:
    def __init__(self, vocab_size, token, by, after=0):
        self.bias, self.after = {token: by}, after

    def __call__(self, prompt_ids, output_ids):
        return self.bias if len(output_ids) >= self.after else {}


class Failing:
    def __init__(self, vocab_size, after):
        self.after = after

    def __call__(self, prompt_ids, output_ids):
        if len(output_ids) >= self.after:
            raise KeyError("no such thing")
        return {}


class Speechless(Exception):
    def __str__(self):
        raise AttributeError("code")


class Silent:
    def __init__(self, vocab_size, after):
        self.after = after

    def __call__(self, prompt_ids, output_ids):
        if len(output_ids) >= self.after:
            raise Speechless
        return {}

def returning(vocab_size, what):
    return lambda prompt_ids, output_ids: np.zeros(3, bool) if what == "mask" else what
"""
NAMES = {"successor": "Successor", "push": "Push", "failing": "Failing", "returning": "returning", "silent": "Silent"}
PROMPT = [1, 30, 41, 52]


@pytest.fixture
def outside(install):
    """A distribution with processors; gives the calls of ``successor``."""
    for name, value in NAMES.items():
        install("engine.logits_processors", name, f"outside_{name}:{value}", SOURCE)
    import outside_successor

    return outside_successor.CALLS


def greedy(**params):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | params))


def test_it_is_told_all_tokens_and_its_mask_holds(llm, outside):
    params = greedy(logits_processors={"successor": {"step": 2}})
    output = llm.generate([PROMPT], params)[0].outputs[0]
    assert output.token_ids == (54, 56, 58, 60, 62, 64)
    assert outside == [(tuple(PROMPT), output.token_ids[:n]) for n in range(6)]


def test_biases_add_up_with_others(llm, outside):
    push = {"push": {"token": 77, "by": 500.0, "after": 2}}
    output = llm.generate([PROMPT], greedy(logits_processors=push))[0].outputs[0]
    plain = llm.generate([PROMPT], greedy())[0].outputs[0]
    assert output.token_ids == (*plain.token_ids[:2], 77, 77, 77, 77)
    two = push | {"successor": {}}
    both = llm.generate([PROMPT], greedy(logits_processors=two, logit_bias={90: 900.0}))[0].outputs[0]
    assert both.token_ids == (53, 54, 55, 56, 57, 58)
    banned = greedy(logits_processors=push, logit_bias={77: -math.inf})
    assert 77 not in llm.generate([PROMPT], banned)[0].outputs[0].token_ids


def test_samples_and_beams(llm, outside):
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, logits_processors={"successor": {}})
    outputs = llm.generate([PROMPT], params)[0].outputs
    assert [c.token_ids for c in outputs] == [(53, 54, 55, 56)] * 3
    push = {"push": {"token": 77, "by": -math.inf}}
    wide = BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True)
    found = llm.beam_search([PROMPT], wide)[0].outputs
    token = found[0].token_ids[0]
    push["push"]["token"] = token
    without = BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True, logits_processors=push)
    assert all(token not in c.token_ids for c in llm.beam_search([PROMPT], without)[0].outputs)


@pytest.mark.parametrize("after", [0, 3])
def test_a_failing_one_ends_its_request_alone(llm, outside, after):
    failing = greedy(logits_processors={"failing": {"after": after}})
    alone = llm.generate([PROMPT], greedy())[0].outputs
    params = [greedy(), failing, greedy(), greedy(n=2, logits_processors={"failing": {"after": after}})]
    outputs = llm.generate([PROMPT] * 4, params)
    assert outputs[0].outputs == outputs[2].outputs == alone
    for output in (outputs[1], outputs[3]):
        for completion in output.outputs:
            assert completion.finish_reason == "error" and len(completion.token_ids) == after
            assert completion.stop_reason == "The logits processor 'failing' failed: KeyError: 'no such thing'"


def test_one_whose_exception_says_nothing_ends_its_request_alone(llm, outside):
    silent = greedy(logits_processors={"silent": {"after": 3}})
    alone = llm.generate([PROMPT], greedy())[0].outputs
    outputs = llm.generate([PROMPT] * 3, [greedy(), silent, greedy()])
    assert outputs[0].outputs == outputs[2].outputs == alone
    [failed] = outputs[1].outputs
    assert failed.finish_reason == "error" and failed.stop_reason == "The logits processor 'silent' failed: Speechless."


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({999: 1.0}, "it gave a token id outside of 0 to 319"),
        ({-1: 1.0}, "it gave a token id outside of 0 to 319"),
        ({3: math.nan}, "it gave a bias that is neither"),
        ({3: math.inf}, "it gave a bias that is neither"),
        ({"x": 1.0}, "ValueError"),
        ("mask", r"a mask is bool \(320,\)"),
        (None, "TypeError"),
    ],
)
def test_what_it_may_not_give(llm, outside, what, sentence):
    output = llm.generate([PROMPT], greedy(logits_processors={"returning": {"what": what}}))[0].outputs[0]
    assert output.finish_reason == "error"
    assert re.search(sentence, output.stop_reason)


def test_unknown_names_and_parameters_are_refused(llm, outside):
    with pytest.raises(
        RequestError, match="no logits processor 'sucessor'; installed are: failing, push, returning, silent, succ"
    ):
        llm.generate([PROMPT], greedy(logits_processors={"sucessor": {}}))
    with pytest.raises(RequestError, match="'successor' could not be made: TypeError"):
        llm.generate([PROMPT], greedy(logits_processors={"successor": {"size": 1}}))
    with pytest.raises(RequestError, match="'successor' could not be made: ValueError"):
        llm.generate([PROMPT], greedy(logits_processors={"successor": {"step": "one"}}))
