"""The KV cache's memory, taken before it is used."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from resident import in_memory

from engine import LLM, SamplingParams
from engine.cli.main import run
from engine.errors import ConfigError
from engine.program.execute import StepSession
from engine.program.population import Population, Room
from engine.runtime.config import EngineConfig
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint
from engine.testing.memory import check_populate
from engine_cpu.device import CpuDevice

MIB = 1 << 20


linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems give memory when it is first written to")


@pytest.fixture
def device():
    return CpuDevice(threads=1)


@linux
def test_memory_that_others_freed_is_not_taken_instead(device):
    # 32 MiB and less come from the C library's heap once such a piece was freed; the last keeps it from shrinking.
    np.ones(31 * MIB, np.uint8)
    pieces = [np.ones(30 * MIB, np.uint8) for _ in range(4)]
    last = np.ones(MIB, np.uint8)
    del pieces
    state = device.alloc((64, MIB // 4), "f32")
    assert in_memory(state) < 16 * MIB and last.all()


@linux
def test_memory_is_taken_and_keeps_what_it_holds(device):
    state = device.alloc((64, MIB // 4), "f32")
    state[3, 5] = 7
    assert in_memory(state) < 16 * MIB
    device.populate(state, 2, 32)
    assert 32 * MIB <= in_memory(state) < 48 * MIB
    assert state[3, 5] == 7 and np.count_nonzero(state) == 1
    device.populate(state, 0, 64)
    assert in_memory(state) >= 64 * MIB and np.count_nonzero(state) == 1


def test_the_kit_finds_a_device_that_clears_what_it_populates(device):
    class Clears(CpuDevice):
        def populate(self, state, first, count):
            state[first : first + count] = 0

    rng = np.random.default_rng()
    check_populate(device, rng)
    with pytest.raises(AssertionError, match="populate of 5 entries"):
        check_populate(Clears(threads=1), rng)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_all_states_are_populated_first_things_first():
    asked = []
    rooms = [
        Room(lambda *given: asked.append(given), name, entries, 1 << 20) for name, entries in (("k", 10), ("v", 3))
    ]
    Population(rooms, lambda: False)
    assert within(10, lambda: len(asked) == 4)
    assert asked == [("k", 0, 4), ("v", 0, 3), ("k", 4, 4), ("k", 8, 2)]


def test_stopping_waits_for_the_piece_that_is_asked_for():
    asked = []

    def slow(state, first, count):
        time.sleep(0.05)
        asked.append(first)

    population = Population([Room(slow, None, 1 << 20, 4 << 20)], lambda: False)
    assert within(10, lambda: len(asked) > 0)
    population.stop()
    seen = len(asked)
    time.sleep(0.15)
    assert 1 <= seen < 100 and len(asked) == seen


def test_nothing_is_asked_for_while_steps_run():
    asked, busy = [], [True]
    population = Population([Room(lambda *given: asked.append(given), "k", 3, 4 << 20)], lambda: busy[0])
    time.sleep(0.1)
    assert asked == []
    busy[0] = False
    assert within(10, lambda: len(asked) == 3)
    busy[0] = True
    paused = Population([Room(lambda *given: asked.append(given), "v", 3, 4 << 20)], lambda: busy[0])
    paused.stop()
    population.stop()
    assert len(asked) == 3


class Asked:
    """What of which state the device was asked to populate: how often each entry was."""

    def __init__(self, monkeypatch, pause: float = 0.0) -> None:
        self.times: dict[int, np.ndarray] = {}
        given = CpuDevice.populate

        def populate(device, state, first, count):
            time.sleep(pause)
            self.times.setdefault(id(state), np.zeros(len(state), int))[first : first + count] += 1
            given(device, state, first, count)

        monkeypatch.setattr(CpuDevice, "populate", populate)

    def total(self) -> int:
        return sum(int(times.sum()) for times in list(self.times.values()))


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())


def device_states(llm: LLM) -> list[np.ndarray]:
    states = llm.engine._core._session._states
    return [state for place, some in states.items() if place != "host" for state in some.values()]


SETTINGS = {"max_num_seqs": 4, "max_model_len": 96, "kv_cache_tokens": 200_000}


@pytest.mark.parametrize("backend", ["cpu", "reference"])  # the reference has no populate
def test_an_engine_takes_all_its_cache(backend, folder, monkeypatch):
    asked = Asked(monkeypatch, pause=0.02)
    rng = np.random.default_rng()
    prompts = models.random_prompts(rng, (3, 40, 9))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for populate in ("as used", "when idle", "first"):
        with LLM(folder, backend=backend, populate_cache=populate, **SETTINGS) as llm:
            if populate == "first" and backend == "cpu":
                assert asked.total() == sum(map(len, device_states(llm)))
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            states = device_states(llm)
            entries = sum(map(len, states)) if populate != "as used" and backend == "cpu" else 0
            assert within(30, lambda want=entries: asked.total() >= want)
            assert set(asked.times) == ({id(state) for state in states} if entries else set())
            assert all((times == 1).all() for times in asked.times.values())
            asked.times.clear()
    assert found[0] == found[1] == found[2]


def test_a_session_is_busy_while_steps_run_and_shortly_after(folder, monkeypatch):
    seen = []
    run = StepSession._run_exactly

    def watched(session, *given):
        seen.append(session._busy())
        return run(session, *given)

    monkeypatch.setattr(StepSession, "_run_exactly", watched)
    with LLM(folder, backend="cpu", **SETTINGS) as llm:
        session = llm.engine._core._session
        assert not session._busy()
        llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert seen and all(seen)
        assert within(10, lambda: not session._busy())


@linux
def test_a_busy_session_asks_for_nothing(folder, monkeypatch):
    busy = [True]
    monkeypatch.setattr(StepSession, "_busy", lambda session: busy[0])
    asked = Asked(monkeypatch)
    with LLM(folder, backend="cpu", populate_cache="when idle", **SETTINGS) as llm:
        time.sleep(0.1)
        assert asked.total() == 0
        busy[0] = False
        assert within(30, lambda: asked.total() == sum(map(len, device_states(llm))))


@linux
def test_an_engine_that_closes_asks_for_no_more_of_its_cache(folder, monkeypatch):
    monkeypatch.setattr("engine.program.population._PIECE", 1 << 10)
    asked = Asked(monkeypatch, pause=0.05)
    with LLM(folder, backend="cpu", populate_cache="when idle", **SETTINGS) as llm:
        entries = sum(map(len, device_states(llm)))
        assert within(10, lambda: asked.total() > 0)
    seen = asked.total()
    time.sleep(0.2)
    assert 0 < seen < entries and asked.total() == seen


@linux
def test_no_memory_is_asked_for_after_an_interrupted_wait(folder, monkeypatch):
    def interrupted(population):
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.program.population._PIECE", 1 << 10)
    monkeypatch.setattr(Population, "wait", interrupted)
    Asked(monkeypatch, pause=0.05)
    with pytest.raises(KeyboardInterrupt):
        LLM(folder, backend="cpu", populate_cache="first", **SETTINGS)
    assert "engine-populate" not in {thread.name for thread in threading.enumerate()}


def test_bench_takes_what_its_cases_need(folder, monkeypatch, capsys):
    asked = Asked(monkeypatch, pause=0.02)
    before: list[int] = []
    submit = StepSession.submit

    def noted(session, inputs):
        before.append(asked.total())
        return submit(session, inputs)

    monkeypatch.setattr(StepSession, "submit", noted)
    assert run(["bench", str(folder), "--case", "1,0,20,4", "--repetitions", "1", "--backend", "cpu", "--json"]) == 0
    assert asked.times and all((times == 1).all() for times in asked.times.values())
    assert set(before) == {asked.total()}  # all of it before the first step
    assert min(map(len, asked.times.values())) <= 4  # the blocks of 26 tokens, and the null block


def test_a_way_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match=r"populate_cache is 'now'; choose one of as used, when idle, first\."):
        EngineConfig(model=Path("model"), populate_cache="now")
