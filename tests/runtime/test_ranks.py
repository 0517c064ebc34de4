"""Tensor parallelism with real processes over gloo, and with threads: tokens of one process, and ends without hanging."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import tiny_models

from engine import LLM, BeamSearchParams, SamplingParams
from engine.errors import BackendError, ConfigError, EngineStoppedError
from engine.formats import open_checkpoint
from engine.quantize.mix import quant_type
from engine.quantize.to_gguf import quantize_to_gguf
from engine.testing.checkpoints import write_checkpoint
from engine.testing.collectives import CHECKS, Subject
from engine.testing.models import compare_answers, random_prompts

pytest.importorskip("torch")
TWO = {"tensor_parallel_size": 2, "collectives": "gloo", "threads": 1}
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 0}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=7, max_tokens=16, n=2)

BEAMS = BeamSearchParams(beam_width=3, max_tokens=8)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def worker(llm: LLM) -> int:
    """The process of rank 1."""
    return llm.loaded.ranks._workers[0]._process.pid


@pytest.mark.shared
def test_stories_on_two_processes(stories, backend):
    """Sampling too, whose penalties read a history that each rank has for itself; beams and forks copy in all ranks."""
    path, before = stories / "stories260K-f32.gguf", children()
    prompts = [[1, 403, 407, 261, 378], [1], list(range(300, 340))]
    settings = {"backend": backend, "max_model_len": 128, "kv_cache_dtype": "f32"}
    with LLM(path, **settings, threads=1) as alone:
        want, sampled = alone.generate(prompts, SamplingParams(**GREEDY)), alone.generate(prompts, SAMPLED)
        beams = alone.beam_search(prompts, BEAMS)
    with LLM(path, **settings, **TWO) as llm:
        got, again = llm.generate(prompts, SamplingParams(**GREEDY)), llm.generate(prompts, SAMPLED)
        again += llm.beam_search(prompts, BEAMS)
        assert llm.loaded.plan.states[0].shape != alone.loaded.plan.states[0].shape, (
            "each rank has half of the KV heads"
        )
    compare_answers(got, want, 2e-3)
    assert _tokens(again) == _tokens(sampled + beams)
    assert children() <= before, "a rank's process is left"


def _tokens(outputs):
    return [[c.token_ids for c in o.outputs] for o in outputs]


@pytest.mark.parametrize("kind", ["moe", "quantized"])
def test_models_on_two_processes(kind, tmp_path, cpu):
    rng = np.random.default_rng(5)
    path = write_checkpoint("mixtral", tmp_path / "hf", rng)
    if kind == "quantized":
        tiny_models.write_llama(tmp_path, rng)
        path = tmp_path / "model.gguf"
        quantize_to_gguf(open_checkpoint(tmp_path), path, quant_type("Q8_0"))
    prompts = random_prompts(rng)
    settings = {"backend": cpu, "max_model_len": 128, "kv_cache_dtype": "f32"}
    with LLM(path, **settings, threads=1) as alone:
        want = alone.generate(prompts, SamplingParams(**GREEDY))
    with LLM(path, **settings, **TWO) as llm:
        got = llm.generate(prompts, SamplingParams(**GREEDY))
    compare_answers(got, want, 2e-3 if kind == "moe" else 0.3)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not take memory back at once")
def test_all_ranks_map_the_same_blocks(llama, cpu):
    """Memory for two sequences of four, so that pages change places; a rank refuses steps in what it has not mapped."""
    prompts, params = [[n] * (30 + n) for n in range(3, 9)], SamplingParams(**{**GREEDY, "max_tokens": 50})
    settings = {"backend": cpu, "kv_cache_dtype": "f32", "max_model_len": 128, "max_num_seqs": 4, "block_size": 4}
    with LLM(llama, **settings, threads=1) as alone:
        want = alone.generate(prompts, params)
    with LLM(llama, **settings, **TWO, kv_allocator="virtual", kv_cache_memory=5 * 16 * 1024) as llm:
        assert llm.loaded.memory.num_blocks == (5 * 16,)
        got = llm.generate(prompts, params)
        assert llm.engine.scheduler_stats().preemptions
    compare_answers(got, want, 2e-3)


@pytest.fixture
def endless(llama, cpu):
    """A model on two processes, and a request that goes on for long."""
    with LLM(llama, backend=cpu, watchdog_s=6.0, **TWO) as llm:
        yield llm, SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["killed", "stopped"]
)
def test_a_lost_rank_ends_requests_with_a_sentence(how, endless):
    llm, params = endless
    pid = worker(llm)
    threading.Timer(0.1, os.kill, (pid, how)).start()
    began = time.monotonic()
    sentences = set()
    while not sentences and time.monotonic() - began < 60:
        sentences = _errors(llm, params)
    assert time.monotonic() - began < 60
    assert all("Rank 1 of 2 is lost" in s or "Rank 0 of 2 failed" in s or "seems to hang" in s for s in sentences)
    with pytest.raises(EngineStoppedError, match=r"Rank|seems to hang"):
        llm.generate([[1, 2]], params)
    llm.close()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_requests_end_before_what_hangs_for_want_of_a_rank_is_closed(endless, monkeypatch):
    llm, params = endless
    llm.generate([[1]], SamplingParams(max_tokens=1))
    closed = threading.Event()
    monkeypatch.setattr(llm.engine._core._session._local, "close", closed.wait)
    threading.Timer(0.1, os.kill, (worker(llm), signal.SIGKILL)).start()
    while not (sentences := _errors(llm, params)):
        pass
    assert llm.engine._core._thread.is_alive() and not llm.engine.health().alive
    assert all(sentence.startswith("Rank ") for sentence in sentences)
    closed.set()


def _errors(llm: LLM, params: SamplingParams) -> set[str]:
    """What requests ended with that did not end well."""
    try:
        outputs = llm.generate([[1, 2, 3], [4]], params)
    except EngineStoppedError as error:
        return {str(error)}
    return {str(c.stop_reason) for o in outputs for c in o.outputs if c.finish_reason == "error"}


ALONE = """
import sys, time
from engine import LLM, SamplingParams

llm = LLM(sys.argv[1], backend="cpu", threads=1, tensor_parallel_size=2, collectives="gloo")
print(llm.loaded.ranks._workers[0]._process.pid, flush=True)
while True:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=200, ignore_eos=True))
"""


def test_ranks_end_when_rank_0_is_killed(llama, cpu):
    rank_0 = subprocess.Popen([sys.executable, "-c", ALONE, llama], stdout=subprocess.PIPE, text=True)
    other = psutil.Process(int(rank_0.stdout.readline()))
    time.sleep(0.3)  # within a step, most likely
    rank_0.kill()
    rank_0.wait()
    other.wait(20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_that_lives_on_keeps_no_rank(llama, cpu):
    waits, lives = os.pipe()
    with LLM(llama, backend=cpu, **TWO) as llm:
        child = os.fork()
        if not child:
            os.close(lives)
            os.read(waits, 1)
            os._exit(0)
        rank = llm.loaded.ranks._workers[0]._process
    os.close(lives)
    os.waitpid(child, 0)
    assert rank.returncode == 0, "it had to be killed"


def test_what_a_rank_cannot_do_is_told_at_once(llama, cpu, install, tmp_path):
    for settings, sentence in (
        ({"collectives": "nobody"}, "There are no collectives 'nobody'"),
        ({"backend": "nobody", "collectives": "gloo"}, "There is no backend 'nobody'"),
    ):
        with pytest.raises(BackendError, match=sentence):
            LLM(llama, **{"backend": cpu, "tensor_parallel_size": 2, **settings})
    install("engine.collectives", "late", "late_ones:manifest", LATE)
    before = children()
    with pytest.raises(
        BackendError, match=r"Rank 1 of 2 failed: Rank 1 of 2 could not join its group through late: no port"
    ):
        LLM(llama, backend=cpu, tensor_parallel_size=2, collectives="late")
    assert children() <= before


LATE = """
import time
from engine.backend.v1 import API, CollectivesManifest, Probe

def join(group):
    if group.rank:
        raise OSError("no port")
    time.sleep(0.5)
    raise OSError("nobody came")

manifest = CollectivesManifest("late", API, lambda: Probe(True, "late"), join)
"""


def test_settings_are_checked(llama):
    for settings, sentence in (
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be at least 1"),
        ({"tensor_parallel_size": 65}, "it may be at most 64"),
        ({"tensor_parallel_size": 2, "place": "head: cpu"}, "not by both"),
        ({"tensor_parallel_size": 2, "preemption": "swap"}, "preempt by recomputation"),
        ({"tensor_parallel_size": 2, "pin_threads": True}, "leave pin_threads out"),
        ({"tensor_parallel_size": 3}, "cannot be shared by 3 ranks"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            LLM(llama, backend="reference", **settings)


@pytest.fixture
def threaded(install):
    """A backend whose ranks are threads, with collectives over values of its own."""
    install("engine.backends", "threaded", "thread_group:threaded")
    return "threaded"


def test_ranks_in_threads_exchange_values_of_their_device(llama, threaded):
    prompts = random_prompts(np.random.default_rng())
    settings = {"backend": threaded, "max_model_len": 96, "kv_cache_dtype": "f32"}
    with LLM(llama, **settings) as alone:
        want = alone.generate(prompts, SamplingParams(**GREEDY))
    with LLM(llama, **settings, tensor_parallel_size=2) as llm:
        exchanges = [p for p in llm.loaded.placement.calls if p.call.op in ("all_reduce", "all_gather")]
        assert len(exchanges) == 5 and {placed.place for placed in exchanges} == {"device"}
        got = llm.generate(prompts, SamplingParams(**GREEDY))
    compare_answers(got, want, 2e-3)


@pytest.mark.parametrize("check", CHECKS)
def test_the_kit_passes_a_devices_collectives_in_threads(check, threaded):
    function, ranks = CHECKS[check]
    Subject("", threaded, where="threads").check(function, ranks, int(np.random.default_rng().integers(2**32)))


@pytest.mark.parametrize("check", [pytest.param(c, marks=[] if c == "values" else pytest.mark.slow) for c in CHECKS])
def test_the_kit_passes_gloo(check):
    function, ranks = CHECKS[check]
    Subject("gloo").check(function, ranks, int(np.random.default_rng().integers(2**32)))
