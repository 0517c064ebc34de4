"""Requests with a grammar, beside others and alone, through every way that a step can go."""

from __future__ import annotations

import re

import numpy as np
import pytest
from json_schemas import SCHEMAS, fault

from engine import SamplingParams, StructuredOutputs
from engine.errors import RequestError

EOS = 2
PROMPT = [1, 30, 41, 52]
COUNT = 18


def requests():
    """Prompts of mixed lengths; two of three requests have a grammar."""
    rng = np.random.default_rng(5)
    forms = [
        StructuredOutputs(regex="[a-z ]{1,12}(-[0-9]{1,4}){2}"),
        StructuredOutputs(json=SCHEMAS["bounded arrays"]),
        StructuredOutputs(grammar='root ::= ("x" | "(" root ")"){1,3}'),
    ]
    prompts = [rng.integers(3, 320, int(rng.choice([1, 15, 16, 33, 60]))).tolist() for _ in range(COUNT)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(20, 60)),
            seed=n,
            temperature=float(rng.choice([0.0, 1.0])),
            logprobs=1,
            structured_outputs=forms[n // 3 % 3] if n % 3 else None,
        )
        for n in range(COUNT)
    ]
    return prompts, params


def answers(outputs):
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for out in outputs for o in out.outputs]


@pytest.fixture(scope="module")
def alone(open_llm):
    known = {}

    def get(backend):
        if backend not in known:
            llm = open_llm(backend)
            prompts, params = requests()
            known[backend] = [llm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
        return answers(known[backend])

    return get


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 7}], ids=str)
def test_together_is_alone(open_llm, backend, alone, settings, in_flight, monkeypatch):
    llm = open_llm(backend, **settings)
    monkeypatch.setattr(llm.engine._core, "_max_in_flight", in_flight)
    assert answers(llm.generate(*requests())) == alone(backend)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_preempted_is_not(open_llm, backend, alone, in_flight, monkeypatch):
    memory = 160 * open_llm(backend).loaded.memory.groups[0].bytes_a_token
    llm = open_llm(backend, block_size=4, max_model_len=153, kv_cache_memory=memory)
    monkeypatch.setattr(llm.engine._core, "_max_in_flight", in_flight)
    llm.engine._core.scheduler.allocator.forget()
    before = llm.engine._core.scheduler.stats().preemptions
    assert answers(llm.generate(*requests())) == alone(backend)
    assert llm.engine._core.scheduler.stats().preemptions > before + 2


def test_only_rows_with_a_grammar_wait_for_their_token(llm, monkeypatch):
    """With two steps in flight the others take part in each, and read their last token from the device."""
    core = llm.engine._core
    monkeypatch.setattr(core, "_max_in_flight", 2)
    steps, submit = [], core._session.submit

    def spy(inputs):
        steps.append(inputs.arrays)
        return submit(inputs)

    monkeypatch.setattr(core._session, "submit", spy)
    plain = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    formed = SamplingParams(max_tokens=30, temperature=0.0, structured_outputs=StructuredOutputs(regex="a{200}"))
    llm.generate([PROMPT, PROMPT[:-1]], [plain, formed])
    waiting = [a["token_ids"][a["rows"]][a["mask_rows"] >= 0] for a in steps]
    assert len(steps) >= 30 and all((ids >= 0).all() for ids in waiting)
    masked = sum(len(arrays["masks"]) for arrays in steps)
    assert masked == 30, "each of its tokens is chosen once, with its mask"
    assert sum((arrays["token_ids"] == -1).any() for arrays in steps) > 15


def test_samples_of_one_prompt_have_states_of_their_own(llm):
    params = SamplingParams(
        n=6, seed=3, max_tokens=200, structured_outputs=StructuredOutputs(json=SCHEMAS["references and alternatives"])
    )
    outputs = llm.generate(PROMPT, params)[0].outputs
    texts = [out.text for out in outputs]
    assert len(set(texts)) > 2 and all(out.finish_reason == "stop" for out in outputs)
    assert [fault(text, SCHEMAS["references and alternatives"]) for text in texts] == [None] * 6
    first = llm.generate(PROMPT, SamplingParams(**{**vars(params), "n": 1}))[0].outputs[0]
    assert first.token_ids == outputs[0].token_ids


def test_an_end_comes_only_where_the_grammar_accepts(llm):
    def run(regex, **params):
        form = StructuredOutputs(regex=regex)
        given = {"logit_bias": {EOS: 1000.0}, "temperature": 0.0, "max_tokens": 20, "structured_outputs": form} | params
        out = llm.generate(PROMPT, SamplingParams(**given))[0].outputs[0]
        return out.text, out.finish_reason, out.stop_reason

    assert run("abc(de)*") == ("abc", "stop", EOS)
    assert run("abc") == ("abc", "stop", None), "a text that is complete needs no end"
    text, *ended = run("abc(d)*", ignore_eos=True)
    assert re.fullmatch("abcd{10,}", text) and ended == ["length", None]
    text, *ended = run("abc(de)*", min_tokens=8)
    assert re.fullmatch("abc(de)+", text) and ended == ["stop", EOS], "not before so many tokens"
    assert run("abc", min_tokens=15) == ("abc", "stop", None)
    assert run("()", min_tokens=15) == ("", "stop", None), "nothing but an end can come"
    assert run("()", ignore_eos=True) == ("", "stop", None)
    assert run("abc(d)*", stop=["d"], logit_bias={}, ignore_eos=True) == ("abc", "stop", "d")
    assert run("abcdef", max_tokens=3)[1] == "length"


def test_penalties_and_bias_choose_among_what_is_allowed(llm):
    form = StructuredOutputs(regex="(yes|no|maybe)( [0-9])?")
    for seed in range(8):
        params = SamplingParams(
            seed=seed, temperature=1.7, top_k=5, top_p=0.9, repetition_penalty=1.5, structured_outputs=form
        )
        assert re.fullmatch("(yes|no|maybe)( [0-9])?", llm.generate(PROMPT, params)[0].outputs[0].text)


def test_a_ban_of_all_that_is_allowed_fails_the_request_alone(llm):
    token = llm.get_tokenizer().encode("a")[0]
    ban = SamplingParams(logit_bias={token: -np.inf}, structured_outputs=StructuredOutputs(regex="a"))
    good = SamplingParams(temperature=0.0, max_tokens=8)
    failed, other = llm.generate([PROMPT, PROMPT], [ban, good])
    assert failed.outputs[0].finish_reason == "error" and "No token is left" in failed.outputs[0].stop_reason
    assert other.outputs == llm.generate(PROMPT, good)[0].outputs


def test_a_grammar_that_fails_midway_fails_its_request_alone(llm):
    """The parser's limits stop it; the sentence says so."""
    params = SamplingParams(max_tokens=50, structured_outputs=StructuredOutputs(regex="a{1000000}"))
    good = SamplingParams(temperature=0.0, max_tokens=8)
    failed, other = llm.generate([PROMPT, PROMPT], [params, good])
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].stop_reason.startswith("The grammar has failed: ")
    assert other.outputs == llm.generate(PROMPT, good)[0].outputs


def test_a_wrong_grammar_is_refused_before_admission(llm):
    with pytest.raises(RequestError, match="Invalid type"):
        llm.generate(PROMPT, SamplingParams(structured_outputs=StructuredOutputs(json={"type": "text"})))


def test_both_formats_of_a_model_write_the_same(stories, backend):
    from engine import LLM

    params = [
        SamplingParams(max_tokens=150, seed=n, structured_outputs=StructuredOutputs(json=schema))
        for n, schema in enumerate(SCHEMAS.values())
    ]
    texts = []
    for name in ("stories260K-f32.gguf", "hf"):
        with LLM(stories / name, backend=backend, threads=2) as llm:
            texts.append([out.outputs[0].text for out in llm.generate(["Once upon a time"] * 5, params)])
    assert texts[0] == texts[1]
    assert [fault(text, schema) for text, schema in zip(texts[0], SCHEMAS.values(), strict=True)] == [None] * 5
