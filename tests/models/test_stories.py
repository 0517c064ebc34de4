"""A real model: stories260K tells the story that every engine tells from these weights."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams

PROMPT = "Once upon a time"
BEGINNING = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
FILES = ("stories260K-f32.gguf", "hf")

pytestmark = pytest.mark.shared


def story(path, backend, params=GREEDY, **settings):
    with LLM(path, backend=backend, threads=2, **settings) as llm:
        return llm.generate(PROMPT, params)[0]


@pytest.fixture(scope="module")
def oracle(stories):
    """The story from the GGUF on the reference backend, with an exact cache."""
    return story(stories / FILES[0], "reference", kv_cache_dtype="f32")


def test_the_reference_tells_it(oracle):
    answer = oracle.outputs[0]
    assert answer.text.startswith(BEGINNING)
    assert len(answer.token_ids) == 200 and answer.finish_reason == "length"
    assert oracle.prompt_token_ids == (1, 403, 407, 261, 378)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_every_backend_tells_it_from_both_formats(stories, oracle, backend, file, kv_dtype):
    told = story(stories / file, backend, kv_cache_dtype=kv_dtype)
    assert told.prompt_token_ids == oracle.prompt_token_ids
    assert told.outputs[0].token_ids == oracle.outputs[0].token_ids
    assert told.outputs[0].text == oracle.outputs[0].text


def test_ids_in_place_of_text(stories, oracle, backend):
    with LLM(stories / "hf", backend=backend, threads=2, kv_cache_dtype="f32") as llm:
        told = llm.generate([list(oracle.prompt_token_ids)], GREEDY)[0]
    assert told.prompt is None
    assert told.outputs[0].token_ids == oracle.outputs[0].token_ids


def test_fused_is_unfused(stories, oracle, backend):
    told = story(stories / FILES[0], backend, kv_cache_dtype="f32", fused=False)
    assert told.outputs[0].token_ids == oracle.outputs[0].token_ids


def test_a_forced_trip_through_the_device_changes_nothing(stories, oracle, backend):
    short = SamplingParams(temperature=0.0, max_tokens=30)
    told = story(stories / FILES[0], backend, short, kv_cache_dtype="f32", round_trip=True)
    assert told.outputs[0].token_ids == oracle.outputs[0].token_ids[:30]


def test_int8_cache_tells_a_story_that_begins_alike(stories, backend):
    told = story(stories / FILES[0], backend, kv_cache_dtype="int8")
    assert told.outputs[0].text.startswith(", there was a little girl named Lily.")
