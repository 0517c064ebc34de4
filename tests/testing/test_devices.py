"""The device that computes nothing, and the one whose ops take their time."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.backend import registry
from engine.backend.registry import discover, open_device
from engine.errors import BackendError
from engine.program.weights import MappedWeight
from engine.testing.checkpoints import KINDS, write_checkpoint
from engine.testing.models import answers

SLOW = """
from engine.testing.devices import slow_backend
manifest = slow_backend({arguments})
"""
BROKEN = """
from engine.backend.v1 import Manifest, Probe
from engine.testing.devices import NullDevice

class Broken(NullDevice):
    def compile(self, segment, limits, states):
        def run(frame):
            raise ValueError("the bus is gone")
        return run

manifest = Manifest("broken", "1.1", lambda: Probe(True, "It breaks."), lambda index, options: Broken(), False)
"""
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: write_checkpoint(kind, folder / kind, np.random.default_rng(3)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_the_null_device_schedules_every_program_and_computes_nothing(models, kind):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=0, n=2)
    with LLM(models[kind], backend="null", strict=True, max_model_len=96) as llm:
        assert llm.loaded.memory.weights == 0
        outputs = llm.generate([[5] * 40, [6, 7]], params)
        assert llm.loaded.plan.body[0].place == "device" and len(llm.loaded.plan.body) == 1
    assert [list(c.token_ids) for o in outputs for c in o.outputs] == [[0] * 6] * 4


def test_it_reads_no_weight(models, monkeypatch):
    def read(self, *rest):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(MappedWeight, "rows", read)
    monkeypatch.setattr(MappedWeight, "dense", read)
    with LLM(models["llama"], backend="null", max_model_len=96) as llm:
        llm.generate([[5, 6]], PARAMS)


def test_it_is_never_chosen_unless_it_is_named(monkeypatch):
    null = next(backend for backend in discover() if backend.name == "null")
    assert null.probe.available and not null.automatic
    monkeypatch.setattr(registry, "discover", lambda name=None: (null,))
    with pytest.raises(BackendError, match="No backend can run here"):
        open_device("auto", {})
    assert open_device("null", {}).describe().backend == "null"


def test_bench_measures_the_loop_alone(models):
    command = [
        sys.executable,
        "-m",
        "engine.cli.main",
        "bench",
        models["llama"],
        "--backend",
        "null",
        "--case",
        "4,0,16,16",
    ]
    done = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and '"backend": "null"' in done.stdout, done.stderr


def timed(model, **device):
    with LLM(model, max_model_len=96, kv_cache_dtype="f32", **device) as llm:
        start = time.perf_counter()
        outputs = llm.generate([[5, 6, 7]], PARAMS)
        return outputs, time.perf_counter() - start, llm.loaded


def test_each_op_of_the_slow_device_takes_its_time(models, install):
    install(
        "engine.backends",
        "slow",
        "slow_backend_one:manifest",
        SLOW.format(arguments="0.0, attention=0.02, sample=0.03"),
    )
    want, _, _ = timed(models["llama"], backend="reference")
    got, seconds, loaded = timed(models["llama"], backend="slow")
    assert got[0].outputs[0].token_ids == want[0].outputs[0].token_ids
    assert got[0].outputs[0].logprobs == want[0].outputs[0].logprobs
    assert not loaded.placement.fallbacks()
    assert seconds >= 6 * (2 * 0.02 + 0.03), "six steps of two layers"


def test_two_steps_in_flight_hide_what_the_loop_takes(models, install):
    """The next step is submitted while the device runs this one; the tokens are the same."""
    install(
        "engine.backends", "slow", "slow_backend_two:manifest", SLOW.format(arguments="0.0, in_flight=2, sample=0.01")
    )
    want, _, _ = timed(models["llama"], backend="reference")
    got, _, loaded = timed(models["llama"], backend="slow")
    assert loaded.device.describe().max_in_flight == 2
    assert got[0].outputs[0].token_ids == want[0].outputs[0].token_ids


def test_only_the_layers_on_it_are_slow(models, install):
    install("engine.backends", "slow", "slow_backend_three:manifest", SLOW.format(arguments="0.0, attention=0.03"))
    _, one, _ = timed(models["llama"], place="layer 0: slow; rest: reference")
    _, both, _ = timed(models["llama"], place="layers 0-1: slow; rest: reference")
    assert one >= 6 * 0.03 and both >= 12 * 0.03


def test_the_kit_says_what_a_device_failed_with(models, install):
    install("engine.backends", "broken", "broken_backend:manifest", BROKEN)
    with pytest.raises(AssertionError, match=r"prompt 0: .*the bus is gone"):
        answers(models["llama"], "broken", [[5, 6]])
