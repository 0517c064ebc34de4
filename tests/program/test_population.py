"""The KV cache's memory, taken before it is used."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.program.population import Population, Room
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint
from engine.testing.memory import check_populate
from engine_cpu.device import CpuDevice

MIB = 1 << 20


def resident(array: np.ndarray) -> int:
    """Bytes of the mapping that an array lies in which are in memory."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            found = begin <= array.ctypes.data < end
        elif found and words[0] == "Rss:":
            return int(words[1]) * 1024
    raise AssertionError("no mapping holds the array")


linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems give memory when it is first written to")


@pytest.fixture
def device():
    return CpuDevice(threads=1)


@linux
def test_memory_is_taken_and_keeps_what_it_holds(device):
    state = device.alloc((64, MIB // 4), "f32")
    state[3, 5] = 7
    before = resident(state)
    assert before < 16 * MIB
    device.populate(state, 2, 32)
    assert 32 * MIB <= resident(state) < 48 * MIB
    assert state[3, 5] == 7 and np.count_nonzero(state) == 1
    device.populate(state, 0, 64)
    assert resident(state) >= 64 * MIB and np.count_nonzero(state) == 1


def test_the_kit_finds_a_device_that_clears_what_it_populates(device):
    class Clears(CpuDevice):
        def populate(self, state, first, count):
            state[first : first + count] = 0

    rng = np.random.default_rng()
    check_populate(device, rng)
    with pytest.raises(AssertionError, match="populate of 5 entries"):
        check_populate(Clears(threads=1), rng)


def test_all_states_are_populated_first_things_first():
    asked = []
    rooms = [
        Room(lambda *given: asked.append(given), name, entries, 1 << 20) for name, entries in (("k", 10), ("v", 3))
    ]
    assert Population(rooms).wait(10)
    assert asked == [("k", 0, 4), ("v", 0, 3), ("k", 4, 4), ("k", 8, 2)]


def test_stopping_waits_for_the_piece_that_is_asked_for():
    asked = []

    def slow(state, first, count):
        time.sleep(0.05)
        asked.append(first)

    population = Population([Room(slow, None, 1 << 20, 4 << 20)])
    assert not population.wait(0.12)
    population.stop()
    seen = len(asked)
    time.sleep(0.15)
    assert 1 <= seen < 100 and len(asked) == seen


@linux
@pytest.mark.parametrize("backend", ["cpu", "reference"])  # the reference has no populate
def test_an_engine_takes_its_cache_beside_its_steps(backend, tmp_path):
    rng = np.random.default_rng()
    folder = write_checkpoint("llama", tmp_path / "llama", rng)
    prompts = models.random_prompts(rng, (3, 40, 9))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settings = {"max_num_seqs": 4, "max_model_len": 96, "kv_cache_tokens": 200_000}
    found = []
    for populate in (False, True):
        with LLM(folder, backend=backend, populate_cache=populate, **settings) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            session = llm.engine._core._session
            states = [state for states in session._states.values() for state in states.values() if state.ndim > 2]
            if populate:
                assert session._population.wait(30)
                got = sum(resident(state) >= state.nbytes for state in states)
                assert got == len(states) or backend == "reference"
    assert found[0] == found[1]
