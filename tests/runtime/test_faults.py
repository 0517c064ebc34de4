"""A fault in one request ends that request; a fault of the device ends no more than it must, and never in silence."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tiny_models

from engine import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from engine.errors import EngineError, EngineStoppedError
from engine.runtime.load import Loaded

POISON = 300
PROMPTS = [[1, 20 + i, *range(60, 60 + 5 * i)] for i in range(6)]
BAN = {POISON: -np.inf}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logit_bias=BAN)


def alone(llm, prompts=PROMPTS, params=GREEDY):
    return [llm.generate(prompt, params)[0].outputs for prompt in prompts]


@dataclass
class FaultySession:
    """A session whose steps fail when ``POISON`` is among their tokens: in ``submit``, or in ``wait``."""

    session: Any
    at: str

    def submit(self, inputs):
        poisoned = POISON in inputs.arrays["token_ids"]
        if poisoned and self.at == "submit":
            raise RuntimeError("the kernel refused")
        ticket = self.session.submit(inputs)
        return FaultyTicket(ticket) if poisoned else ticket

    def close(self):
        self.session.close()


@dataclass
class FaultyTicket:
    ticket: Any

    def wait(self):
        self.ticket.wait()
        raise RuntimeError("the kernel refused")


@pytest.fixture(params=["submit", "wait"])
def faulty(request, monkeypatch, llama, backend):
    """faulty(**settings) -> an LLM on faulty sessions, and how many of these it has opened."""
    opened = []
    make = Loaded.session

    def session(self):
        opened.append(FaultySession(make(self), request.param))
        return opened[-1]

    llms = []

    def get(**settings):
        monkeypatch.setattr(Loaded, "session", session)
        llms.append(LLM(llama, backend=backend, threads=2, kv_cache_dtype="f32", kv_cache_tokens=2048, **settings))
        return llms[-1], opened

    yield get
    for llm in llms:
        llm.close()


def poisoned(prompt, at):
    return [*prompt[:at], POISON, *prompt[at:]]


def assert_failed(output):
    (out,) = output.outputs
    assert out.finish_reason == "error"
    assert "The device failed on this request: RuntimeError: the kernel refused" in out.stop_reason


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 8}, {"max_num_seqs": 2}])
def test_a_request_that_breaks_steps_fails_alone(faulty, settings):
    llm, opened = faulty(**settings)
    expected = alone(llm)
    assert len(opened) == 1
    prompts = [*PROMPTS[:3], poisoned(PROMPTS[5], 1), *PROMPTS[3:]]
    outputs = llm.generate(prompts, GREEDY)
    assert_failed(outputs.pop(3))
    assert [out.outputs for out in outputs] == expected
    assert len(opened) > 1, "the state was lost, so a new session had to be made"
    assert alone(llm, PROMPTS[:2]) == expected[:2], "the engine goes on"


def test_two_that_break_late_in_their_prompts(faulty):
    """In chunks of 64, each runs well for a step before the one that fails: both must be found out none the less."""
    llm, _ = faulty(max_num_batched_tokens=64)
    long = list(range(100, 200))
    outputs = llm.generate([PROMPTS[4], poisoned(long, 90), poisoned(long[::-1], 95), PROMPTS[5]], GREEDY)
    assert_failed(outputs[1])
    assert_failed(outputs[2])
    assert [outputs[0].outputs, outputs[3].outputs] == alone(llm, PROMPTS[4:])


def test_those_already_answering_go_on_with_the_same_tokens(faulty):
    llm, _ = faulty()
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, n=2, repetition_penalty=1.1, logit_bias=BAN
    )
    expected = llm.generate(PROMPTS[2], params)[0].outputs
    stream = llm.stream(PROMPTS[2], params)
    outputs = [next(stream) for _ in range(8)]
    assert_failed(llm.generate([poisoned(PROMPTS[1], 2)], GREEDY)[0])
    outputs += list(stream)
    assert outputs[-1].outputs == expected


def test_beams_outlive_the_fault_of_another(faulty):
    llm, opened = faulty(max_num_seqs=6, max_num_batched_tokens=16)
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True, logit_bias=BAN)
    expected = [llm.beam_search([prompt], beams)[0].outputs for prompt in PROMPTS[:3]]
    prompts = [*PROMPTS[:3], poisoned(PROMPTS[5], 4), poisoned(PROMPTS[5], 20)]
    outputs = llm._run([None] * 5, prompts, [*[beams] * 4, GREEDY], None, None)
    assert [out.outputs for out in outputs[:3]] == expected
    assert {c.finish_reason for c in outputs[3].outputs} == {"error"} and len(outputs[3].outputs) == 3
    assert_failed(outputs[4])
    assert len(opened) > 1


def test_a_suspect_that_is_aborted_does_not_stop_the_search(faulty):
    llm, _ = faulty(max_num_batched_tokens=8, max_num_seqs=8)
    expected = alone(llm, [PROMPTS[3]])
    for _ in range(5):
        streams = [llm.stream(list(range(200, 260)), GREEDY) for _ in range(3)]
        threads = [threading.Thread(target=lambda s=s: next(s, None)) for s in streams]
        for thread in threads:
            thread.start()
        failed = llm.generate([poisoned(list(range(150, 190)), 30)], GREEDY)[0]
        for thread in threads:
            thread.join()
        for stream in streams:
            stream.close()
        assert_failed(failed)
    assert alone(llm, [PROMPTS[3]]) == expected


def test_a_device_that_is_gone_fails_every_request_and_hangs_none(monkeypatch, llama):
    with LLM(llama, backend="reference", kv_cache_tokens=1024) as llm:
        monkeypatch.setattr(FaultySession, "submit", lambda self, inputs: 1 / 0)
        whole = llm.engine._core._session
        llm.engine._core._session = FaultySession(whole, "submit")
        monkeypatch.setattr(Loaded, "session", lambda self: FaultySession(whole, "submit"))
        outputs = llm.generate(PROMPTS, GREEDY)
        assert {out.outputs[0].finish_reason for out in outputs} == {"error"}
        assert all("ZeroDivisionError" in out.outputs[0].stop_reason for out in outputs)


def test_a_session_that_cannot_be_made_again_ends_the_engine(monkeypatch, llama):
    with LLM(llama, backend="reference", kv_cache_tokens=1024) as llm:
        monkeypatch.setattr(FaultySession, "submit", lambda self, inputs: 1 / 0)
        llm.engine._core._session = FaultySession(llm.engine._core._session, "submit")

        def broken(self):
            raise MemoryError("no memory left")

        monkeypatch.setattr(Loaded, "session", broken)
        try:
            outputs = llm.generate(PROMPTS, GREEDY)
        except EngineStoppedError as error:
            assert "no memory left" in str(error)
        else:
            assert {out.outputs[0].finish_reason for out in outputs} == {"error"}
        with pytest.raises(EngineStoppedError, match="no memory left"):
            llm.generate(PROMPTS[0], GREEDY)
        assert not llm.engine.health().alive


def test_a_loop_that_fails_keeps_what_has_not_begun(llama, monkeypatch):
    with LLM(llama, backend="reference", max_num_seqs=2, kv_cache_tokens=1024) as llm:
        expected = [outputs[0].token_ids for outputs in alone(llm)]

        def broken(*given):
            raise KeyError("a defect of the loop")

        monkeypatch.setattr(llm.engine._core.scheduler, "complete", broken)  # a new one takes its place
        outputs = [out.outputs[0] for out in llm.generate(PROMPTS, GREEDY)]
        assert llm.engine.health().restarts == 1
        for out in outputs[:2]:
            assert out.finish_reason == "error" and "The step loop failed, and has begun anew" in out.stop_reason
        assert [out.token_ids for out in outputs[2:]] == expected[2:]
        assert [outputs[0].token_ids for outputs in alone(llm)] == expected
        llm.engine._core.scheduler.check()


@pytest.mark.parametrize(
    ("what", "ask"),
    [
        ("engine.runtime.pooling.Pooler.vector", lambda llm: llm.embed(PROMPTS[0])),
        ("engine.runtime.members.logprobs", lambda llm: llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=1))),
        ("engine.runtime.beams.BeamGroup.advance", lambda llm: llm.beam_search(PROMPTS[0], BeamSearchParams(max_tokens=3))),
        ("engine.runtime.beams.BeamGroup.found", lambda llm: llm.beam_search(PROMPTS[0], BeamSearchParams(max_tokens=3))),
    ],
)  # fmt: skip
def test_a_fault_with_the_last_of_a_request_ends_it(llama, monkeypatch, what, ask):
    """When the scheduler knows it no more."""

    def broken(*given):
        raise ZeroDivisionError("a defect of what comes behind a step")

    with LLM(llama, backend="reference", max_num_seqs=4, kv_cache_tokens=1024) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(what, broken)
            try:
                [out] = ask(llm)[0].outputs[:1]
            except EngineError as error:
                said = str(error)
            else:
                assert out.finish_reason == "error"
                said = out.stop_reason
        assert "The step loop failed, and has begun anew" in said and "ZeroDivisionError" in said
        assert llm.engine.health().restarts == 1 and len(llm.embed(PROMPTS[:2])) == 2
        assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].finish_reason == "length"
        llm.engine._core.scheduler.check()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A tiny llama whose embedding of the token POISON is not a number."""
    tensors = tiny_models.llama_tensors(np.random.default_rng(1), tiny_models.CONFIG)
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    folder = tmp_path_factory.mktemp("damaged")
    tiny_models.write_llama(folder, np.random.default_rng(1), tensors)
    return folder


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "int16", "int8"])
def test_logits_that_are_no_numbers_fail_their_request_alone(damaged, backend, kv_dtype):
    settings = {
        "threads": 2,
        "kv_cache_dtype": kv_dtype,
        "kv_cache_tokens": 512,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
    }
    with LLM(damaged, backend=backend, **settings) as llm:
        expected = alone(llm)
        for _ in range(3):  # the later ones meet blocks that hold what is no number
            outputs = llm.generate([PROMPTS[0], poisoned(PROMPTS[5], 3), *PROMPTS[1:]], GREEDY)
            failed = outputs.pop(1).outputs[0]
            assert failed.finish_reason == "error" and failed.token_ids == ()
            assert "not finite" in failed.stop_reason
            assert [out.outputs for out in outputs] == expected


def test_a_beam_or_a_prompt_row_that_is_no_number_fails_its_request_alone(damaged, backend, idle):
    with LLM(damaged, backend=backend, threads=2, kv_cache_dtype="f32", kv_cache_tokens=1024) as llm:
        only = {t: 1000.0 for t in (40, POISON, 60, 61)}
        beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, logit_bias=only)
        scored = SamplingParams(max_tokens=3, prompt_logprobs=1)
        prompts = [PROMPTS[3], PROMPTS[4], poisoned(PROMPTS[5], 3)]
        outputs = llm._run([None] * 3, prompts, [GREEDY, beams, scored], None, None)
        assert outputs[0].outputs == llm.generate([PROMPTS[3]], GREEDY)[0].outputs
        for output, count in ((outputs[1], 3), (outputs[2], 1)):
            assert [c.finish_reason for c in output.outputs] == ["error"] * count
            assert "not finite" in output.outputs[0].stop_reason
        assert outputs[2].prompt_logprobs is None
        idle(llm)


def test_a_sink_that_raises_ends_its_request_alone(llama):
    with LLM(llama, backend="reference", kv_cache_tokens=1024) as llm:
        calls = []

        def sink(output):
            calls.append(output)
            raise ValueError("nobody listens")

        llm.engine.submit(None, PROMPTS[2], SamplingParams(max_tokens=200, ignore_eos=True), sink)
        assert [out.outputs for out in llm.generate(PROMPTS, GREEDY)] == alone(llm)
        deadline = time.monotonic() + 10
        while llm.engine.health().running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert llm.engine.health().running == 0
        assert 1 <= len(calls) < 20


# -- aborts ------------------------------------------------------------------------------------------------------------


def test_an_abort_in_the_middle_frees_everything(llama, backend, slowly):
    with LLM(llama, backend=backend, threads=2, kv_cache_tokens=1024, max_num_seqs=4, max_num_batched_tokens=8) as llm:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=150, ignore_eos=True, n=3)
        states = []
        for wanted in (1, 2, 5, 30):  # at once, in the prompt, after the fork, and well into the answers
            ended = threading.Event()
            outputs = []

            def sink(output, ended=ended, outputs=outputs):
                outputs.append(output)
                if output.finished:
                    ended.set()

            ids = [llm.engine.submit(None, list(range(3, 60)), params, sink)]
            ids += [llm.engine.submit(None, list(range(9, 40)), params, lambda output: None)]
            while len(outputs) < wanted - 1:
                time.sleep(0.001)
            for request_id in ids:
                llm.engine.abort(request_id)
            assert ended.wait(10)
            states.append({out.finish_reason for out in outputs[-1].outputs})
            stats = llm.engine._core.scheduler.stats()
            assert (stats.waiting, stats.running) == (0, 0)
            assert all(pool.used == 0 and pool.free + pool.cached == pool.total for pool in stats.pools)
        assert states == [{"abort"}] * 4
        llm.engine.abort("a request that never was")


def test_the_stop_string_of_an_aborted_request_ends_no_other_of_its_id(llama, slowly):
    """Whoever searches for it is behind, and finds it when the id is another's."""
    with LLM(llama, backend="reference", kv_cache_tokens=1024) as llm:
        reading, ended, outputs = threading.Event(), threading.Event(), []

        def note(output):
            outputs.append(output)
            if output.finished:
                ended.set()

        only = {llm.get_tokenizer().token_id("Ġt"): 1000.0}
        stopping = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logit_bias=only, stop="t t t")
        llm.engine.submit(None, PROMPTS[0], stopping, lambda output: reading.wait(10), "same")
        while llm.engine.health().steps < 8:
            time.sleep(0.001)
        llm.engine.abort("same")
        llm.engine.submit(None, PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True), note, "same")
        reading.set()
        assert ended.wait(10), "nobody hears of the request any more"
        assert outputs[-1].outputs[0].finish_reason == "length"


def test_close_ends_pending_requests(llama, backend, slowly):
    llm = LLM(llama, backend=backend, threads=2, kv_cache_tokens=1024, max_num_seqs=2)
    outputs = {}
    for n in range(5):
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        llm.engine.submit(None, PROMPTS[n], params, lambda out, n=n: outputs.update({n: out}))
    while 0 not in outputs:
        time.sleep(0.001)
    llm.close()
    assert {n for n, out in outputs.items() if out.finished} == set(range(5))
    assert {out.outputs[0].finish_reason for out in outputs.values()} == {"abort"}
    with pytest.raises(EngineStoppedError, match="shut down"):
        llm.generate("Once", GREEDY)
    llm.close()  # once more does nothing


# -- the watchdog --------------------------------------------------------------------------------------------------------


@dataclass
class HangingSession:
    """A device that stops answering once ``hang`` is set, until ``release`` is."""

    session: Any
    hang: threading.Event
    release: threading.Event

    def submit(self, inputs):
        ticket = self.session.submit(inputs)
        return HangingTicket(ticket, self) if self.hang.is_set() else ticket

    def close(self):
        self.session.close()


@dataclass
class HangingTicket:
    ticket: Any
    session: HangingSession

    def wait(self):
        self.session.release.wait()
        return self.ticket.wait()


@pytest.fixture
def hanging(monkeypatch):
    hang, release = threading.Event(), threading.Event()
    make = Loaded.session
    monkeypatch.setattr(Loaded, "session", lambda self: HangingSession(make(self), hang, release))
    yield hang
    release.set()


def test_a_device_that_hangs_is_reported_and_left_behind(llama, hanging):
    llm = LLM(llama, backend="reference", kv_cache_tokens=1024, watchdog_s=0.3)
    assert len(llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids) == 10
    hanging.set()
    started = time.monotonic()
    with pytest.raises(EngineStoppedError, match=r"No step has finished for 0\.3 s; the device seems to hang"):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.engine.health().alive
    with pytest.raises(EngineStoppedError, match="seems to hang"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.close()
    assert time.monotonic() - started < 10


def test_the_watchdog_in_an_event_loop(llama, hanging):
    async def main():
        llm = await AsyncLLM.load(llama, backend="reference", kv_cache_tokens=1024, watchdog_s=0.3)
        hanging.set()
        with pytest.raises(EngineStoppedError, match="seems to hang"):
            async for _ in llm.generate(PROMPTS[0], GREEDY):
                pass
        await llm.close()

    asyncio.run(main())


def test_an_idle_engine_is_not_taken_for_hanging(llama):
    with LLM(llama, backend="reference", kv_cache_tokens=1024, watchdog_s=0.2) as llm:
        llm.generate(PROMPTS[0], GREEDY)
        time.sleep(0.5)
        assert llm.engine.health().stalled_s == 0
        llm.engine.check_progress()
        assert len(llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids) == 10
