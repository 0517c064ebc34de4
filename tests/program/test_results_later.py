"""A device that computes by itself has the next step's work before anybody waits for this one's results."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import engine_cpu.device
from engine import LLM, SamplingParams
from engine.program.execute import StepSession
from engine.testing.checkpoints import write_checkpoint

SETTINGS = {"backend": "cpu", "max_model_len": 96, "kv_cache_tokens": 256}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


class Ahead:
    """Makes the CPU a device whose results are waited for later: until the next step has been given to it, or ``seconds``."""

    def __init__(self, monkeypatch, seconds=2.0):
        self.given = defaultdict(threading.Event)
        self.steps, self.followed, self.waited_on = 0, [], set()
        run, plain = StepSession._run_exactly, engine_cpu.device.CpuDevice.describe

        def counted(session, *given):
            self.given[self.steps].set()
            self.steps += 1
            return run(session, *given)

        def copy_out_all(device, values):
            step, arrays = self.steps, [np.array(device.copy_out(value)) for value in values]

            def wait():
                self.waited_on.add(threading.current_thread().name)
                self.followed.append(self.given[step].wait(seconds))
                return arrays

            return wait

        monkeypatch.setattr(StepSession, "_run_exactly", counted)
        monkeypatch.setattr(engine_cpu.device.CpuDevice, "copy_out_all", copy_out_all, raising=False)
        monkeypatch.setattr(engine_cpu.device.CpuDevice, "describe", lambda d: replace(plain(d), max_in_flight=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("later") / "llama", np.random.default_rng())


def test_the_next_step_does_not_wait_for_the_results_of_this_one(folder, monkeypatch):
    prompts = [[3, 4, 5], [6] * 20]
    with LLM(folder, **SETTINGS) as llm:
        want = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    ahead = Ahead(monkeypatch)
    with LLM(folder, **SETTINGS) as llm:
        got = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    assert got == want
    assert len(ahead.followed) >= 8 and ahead.followed.count(False) <= 2  # after the last there is none
    assert ahead.waited_on == {"engine-loop"}


def test_states_come_later_as_well(folder, monkeypatch):
    with LLM(folder, **SETTINGS) as llm:
        want = llm.embed([[3, 4, 5, 6, 7]])[0]
    ahead = Ahead(monkeypatch, 0.0)
    with LLM(folder, **SETTINGS) as llm:
        got = llm.embed([[3, 4, 5, 6, 7]])[0]
    assert np.array_equal(got, want) and ahead.waited_on == {"engine-loop"}


def test_a_fault_that_shows_when_results_are_waited_for_ends_the_request(folder, monkeypatch):
    ahead = Ahead(monkeypatch, 0.0)
    with LLM(folder, **SETTINGS) as llm:
        begun, faults = engine_cpu.device.CpuDevice.copy_out_all, []

        def faulty(device, values):
            wait = begun(device, values)

            def fault():
                wait()
                faults.append(True)
                raise RuntimeError("the device is gone")

            return fault

        monkeypatch.setattr(engine_cpu.device.CpuDevice, "copy_out_all", faulty)
        output = llm.generate([[3, 4, 5]], PARAMS)[0].outputs[0]
        assert output.finish_reason == "error" and faults
        monkeypatch.setattr(engine_cpu.device.CpuDevice, "copy_out_all", begun)
        assert len(llm.generate([[3, 4, 5]], PARAMS)[0].outputs[0].token_ids) == 8
    assert ahead.steps


def test_the_thread_of_steps_waits_little_for_the_interpreters_lock(folder, monkeypatch):
    """It lets go of it in each call of a driver; by itself Python would let it wait for 5 ms."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(5e-3)
        with LLM(folder, **SETTINGS):
            assert sys.getswitchinterval() == pytest.approx(5e-3)  # steps run on the thread that waits for them
        Ahead(monkeypatch)
        with LLM(folder, **SETTINGS):
            assert sys.getswitchinterval() <= 1e-3
    finally:
        sys.setswitchinterval(before)
