"""Any value is either taken as it is meant, or refused with a RequestError in a sentence."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import BeamSearchParams, SamplingParams
from engine.errors import RequestError

numbers = st.one_of(st.integers(), st.floats(), st.integers(-2, 40), st.floats(-3, 3), st.booleans(), st.none())
anything = st.one_of(
    numbers, st.text(max_size=3), st.lists(numbers, max_size=2), st.dictionaries(numbers, numbers, max_size=2)
)
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


def integer(value, low, high=math.inf):
    return type(value) is int and low <= value <= high


def number(value, low, high):
    return type(value) in (int, float) and low <= value <= high


def texts(value):
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, list) and all(isinstance(t, str) and t for t in listed)


# What each field may be, said once more.
ALLOWED = {
    "n": lambda v: integer(v, 1, 1024),
    "best_of": lambda v: v is None or integer(v, 1, 1024),
    "max_tokens": lambda v: v is None or integer(v, 1, 2**30),
    "min_tokens": lambda v: integer(v, 0, 16),  # 16 is max_tokens' default
    "temperature": lambda v: number(v, 0, 100),
    "top_k": lambda v: integer(v, 0, 2**30) or v == -1,
    "top_p": lambda v: number(v, 0, 1) and v > 0,
    "min_p": lambda v: number(v, 0, 1),
    "typical_p": lambda v: number(v, 0, 1) and v > 0,
    "repetition_penalty": lambda v: number(v, 1e-3, 100),
    "frequency_penalty": lambda v: number(v, -100, 100),
    "presence_penalty": lambda v: number(v, -100, 100),
    "no_repeat_ngram_size": lambda v: integer(v, 0, 2**30),
    "logits_processors": lambda v: v is None or v == {},
    "logit_bias": lambda v: (
        v is None
        or (
            isinstance(v, dict)
            and all(
                type(k) is int and (number(b, -1e9, 1e9) or (type(b) is float and b == -math.inf)) for k, b in v.items()
            )
        )
    ),
    "seed": lambda v: v is None or integer(v, 0, 2**64 - 1),
    "logprobs": lambda v: v is None or integer(v, 0, 32),
    "prompt_logprobs": lambda v: v is None or integer(v, 0, 32),
    "stop": lambda v: v is None or texts(v),
    "stop_token_ids": lambda v: v is None or (isinstance(v, list) and all(type(i) is int for i in v)),
    "include_stop_str_in_output": lambda v: type(v) is bool,
    "ignore_eos": lambda v: type(v) is bool,
    "skip_special_tokens": lambda v: type(v) is bool,
    "structured_outputs": lambda v: v is None,
}


def test_every_field_is_described_here():
    assert set(ALLOWED) == set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_takes_what_is_allowed_and_nothing_else(name):
    @given(anything)
    def check(value):
        if ALLOWED[name](value):
            SamplingParams(**{name: value})
            return
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        sentence = str(caught.value)
        assert sentence.endswith(".") and "\n" not in sentence

    check()


@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=6))
def test_any_mixture(values):
    try:
        params = SamplingParams(**values)
    except RequestError:
        return
    assert all(ALLOWED[name](value) or name == "min_tokens" for name, value in values.items())
    assert params.max_tokens is None or params.min_tokens <= params.max_tokens
    assert params.n <= params.samples


def test_forms_that_mean_the_same():
    assert SamplingParams(stop="end").stop == ("end",) == SamplingParams(stop=["end"]).stop
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(temperature=1e-9).temperature == 0


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(RequestError, match=r"min_tokens \(5\) is above max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=50, max_tokens=None).min_tokens == 50


def test_best_of_may_not_be_below_n():
    assert SamplingParams(n=3, best_of=3).samples == 3 == SamplingParams(n=3).samples
    assert SamplingParams(n=2, best_of=5).samples == 5
    with pytest.raises(RequestError, match=r"best_of \(2\) is below n \(3\)"):
        SamplingParams(n=3, best_of=2)


def test_logits_processors_are_names_with_parameters():
    assert SamplingParams(logits_processors={"name": {"size": 1}}).logits_processors == {"name": {"size": 1}}
    for wrong in (["name"], {"name": 3}, {1: {}}, {"name": {2: 3}}, "name"):
        with pytest.raises(RequestError, match="it must map names of processors to their parameters"):
            SamplingParams(logits_processors=wrong)


def test_numbers_of_numpy_are_numbers():
    given = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(-1),
        seed=np.uint64(2**64 - 1),
        max_tokens=np.int32(4),
        logit_bias={np.int64(5): np.float32(2)},
        stop_token_ids=list(np.array([1, 2])),
    )
    plain = SamplingParams(
        temperature=0.5, top_k=0, seed=2**64 - 1, max_tokens=4, logit_bias={5: 2.0}, stop_token_ids=[1, 2]
    )
    assert given == plain and repr(given) == repr(plain)
    beams = BeamSearchParams(beam_width=np.int64(2), length_penalty=np.float32(0.5))
    assert repr(beams) == repr(BeamSearchParams(beam_width=2, length_penalty=0.5))
    for wrong in (np.float32(np.nan), np.float32(-1), np.array([1.0, 2.0]), 1j):
        with pytest.raises(RequestError, match="temperature is"):
            SamplingParams(temperature=wrong)


def test_none_is_none_of_them():
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, logits_processors=None) == SamplingParams()
