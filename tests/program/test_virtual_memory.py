"""The KV cache's memory, mapped as sequences grow: what is resident, what is refused, and what order things are done in."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from resident import in_memory

from engine import LLM, BeamSearchParams, SamplingParams
from engine.backend import host
from engine.backend.v1 import virtual_memory_of
from engine.errors import BackendError, ConfigError, SchedulerError
from engine.program.execute import StepSession
from engine.runtime.config import EngineConfig
from engine.runtime.head_inputs import HeadInputs, RowParams
from engine.runtime.load import load
from engine.runtime.step_inputs import StepArrays
from engine.runtime.swap import remap
from engine.sampling import SamplingParams as Params
from engine.scheduler import ScheduledSequence, ScheduledStep
from engine.testing.memory import check_virtual_memory
from engine_cpu.device import CpuDevice

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not take memory back at once")
MIB = 1 << 20
SETTINGS = {"threads": 2, "kv_cache_dtype": "f32", "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def memory():
    return virtual_memory_of(CpuDevice(threads=1))


def test_addresses_take_no_memory_and_entries_do_while_they_are_mapped(memory):
    assert memory.reserve((1 << 20, MIB // 4), "f32").nbytes == 1 << 40
    state = memory.reserve((1 << 12, MIB // 4), "f32")
    assert in_memory(state) == 0
    memory.map(state, 7, 32)
    assert in_memory(state) == 32 * MIB
    state[7:39] = 3
    memory.unmap(state, 8, 30)
    assert in_memory(state) == 2 * MIB
    memory.map(state, 8, 1)
    assert state[7].all() and state[38].all() and not state[8].any()
    assert in_memory(state) == 3 * MIB


def test_more_addresses_than_there_are(memory):
    with pytest.raises(MemoryError, match="addresses"):
        memory.reserve((1 << 40, 1 << 12), "u8")


def test_only_a_system_that_takes_memory_back_at_once_has_it(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host.host_virtual_memory() is None


class Wrong(CpuDevice):
    """``fault`` says what of its virtual memory is wrong."""

    fault = ""

    def virtual_memory(self):
        own = super().virtual_memory()
        faults = {
            "keeps what was unmapped": replace(own, unmap=lambda state, first, count: None),
            "takes its neighbour's memory, too": replace(own, unmap=lambda s, first, n: own.unmap(s, first - 1, n + 1)),
            "maps what is not zero": replace(own, map=lambda state, first, n: state[first : first + n].fill(1)),
            "has odd granules": replace(own, granularity=12288),
        }
        return faults[self.fault]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("keeps what was unmapped", "other bytes"),
        ("takes its neighbour's memory, too", "other bytes"),
        ("maps what is not zero", "not zero"),
        ("has odd granules", "no power of two"),
    ],
)
def test_the_kit_finds_a_device_that(fault, sentence):
    device = Wrong(threads=1)
    device.fault = fault
    check_virtual_memory(CpuDevice(threads=1), np.random.default_rng())
    with pytest.raises(AssertionError, match=sentence):
        check_virtual_memory(device, np.random.default_rng())


# -- the engine --------------------------------------------------------------------------------------------------------


def states(llm: LLM) -> list[np.ndarray]:
    session = llm.engine._core._session
    return [state for name, state in session._states["device"].items() if name != "history"]


def mapped_pages(llm: LLM) -> int:
    """As the allocator has it, the null block's included."""
    [group] = llm.engine._core.scheduler.allocator._groups
    return 1 + group.held + len(group.idle)


def assert_resident_is_mapped(llm: LLM) -> int:
    page = llm.loaded.addresses.pages[0]
    found = 0
    for state in states(llm):
        assert in_memory(state) == mapped_pages(llm) * page * state[0].nbytes
        found += in_memory(state)
    return found


def test_resident_memory_follows_use(llama, cpu, monkeypatch):
    seen = []
    submit = StepSession.submit

    def noted(session, inputs):
        seen.append(mapped_pages(llm))
        return submit(session, inputs)

    monkeypatch.setattr(StepSession, "submit", noted)
    with LLM(llama, backend=cpu, kv_allocator="virtual", populate_cache="first", **SETTINGS) as llm:
        page = llm.loaded.addresses.pages[0]
        assert page == 8 and page * 4 * 128 * 4 == 4 * 4096, "of two layers with keys and values, each a granule"
        assert assert_resident_is_mapped(llm) == 4 * 4096
        long = SamplingParams(**GREEDY, max_tokens=100)
        llm.generate([[5] * 60], long)
        assert assert_resident_is_mapped(llm) == (1 + 5) * 4 * 4096  # 159 tokens are in 5 pages of 32
        assert seen[0] == 2 and seen == sorted(seen) and seen[-1] == 6, "page by page"
        llm.generate([[7] * 20], SamplingParams(**GREEDY, max_tokens=8))
        assert assert_resident_is_mapped(llm) == 6 * 4 * 4096, "its pages were there already"
        llm.generate([[n] * 60 for n in range(3, 7)], long)
        assert assert_resident_is_mapped(llm) <= llm.loaded.memory.kv


def test_no_more_is_ever_resident_than_the_budget_has(llama, cpu, monkeypatch):
    most = 0
    run = StepSession._run

    def noted(session, inputs):
        nonlocal most
        result = run(session, inputs)
        own = session._states["device"]
        most = max(most, sum(in_memory(state) for name, state in own.items() if name != "history"))
        return result

    monkeypatch.setattr(StepSession, "_run", noted)
    prompts = [[n] * (10 + 9 * n) for n in range(3, 13)]
    params = SamplingParams(**GREEDY, max_tokens=60)
    sizes = {"max_model_len": 192, "kv_cache_tokens": 224}
    with LLM(llama, backend=cpu, kv_allocator="virtual", **SETTINGS, **sizes) as llm:
        found = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
        assert most == llm.loaded.memory.kv == 8 * 4 * 4096
        assert llm.engine.scheduler_stats().preemptions
    with LLM(llama, backend=cpu, **SETTINGS) as llm:
        assert found == [one.outputs[0].token_ids for one in llm.generate(prompts, params)]


@pytest.mark.parametrize("more", [{}, {"preemption": "swap"}], ids=str)
def test_beams_and_samples(llama, cpu, more):
    prompts = [[n] * (20 + 11 * n) for n in range(3, 9)]
    beams = BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True)
    sampled = SamplingParams(temperature=0.9, seed=3, n=4, max_tokens=40, ignore_eos=True)
    found = {}
    for settings in ({"kv_allocator": "virtual", "kv_cache_tokens": 160, "max_model_len": 160} | more, {}):
        with LLM(llama, backend=cpu, **SETTINGS, **settings) as llm:
            searched = [[c.token_ids for c in one.outputs] for one in llm.beam_search(prompts, beams)]
            drawn = [[c.token_ids for c in one.outputs] for one in llm.generate(prompts, sampled)]
            assert bool(llm.engine.scheduler_stats().preemptions) == bool(settings)
            found[bool(settings)] = searched, drawn
    assert found[True] == found[False]


class Log(CpuDevice):
    """What is asked of the device, in order; ``failing``: the numbers of mappings that fail."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.asked: list[str] = []
        self.failing = range(0)

    def virtual_memory(self):
        own = super().virtual_memory()

        def told(name, action):
            def run(state, first, count):
                self.asked.append(name)
                if self.asked.count("map") in self.failing and name == "map":
                    raise MemoryError("no more memory")
                action(state, first, count)

            return run

        return replace(own, map=told("map", own.map), unmap=told("unmap", own.unmap))

    def fence(self):
        self.asked.append("fence")


@pytest.fixture
def logged(monkeypatch):
    made = []

    def open_device(name, options, index):
        made.append(Log(threads=2))
        return made[-1]

    monkeypatch.setattr("engine.runtime.load.open_device", open_device)
    return made


def test_steps_before_have_ended_when_memory_is_taken_away(llama, cpu, logged):
    sizes = {"max_model_len": 96, "kv_cache_tokens": 96}
    with LLM(llama, backend=cpu, kv_allocator="virtual", **SETTINGS, **sizes) as llm:
        llm.generate([[3] * 60], SamplingParams(**GREEDY, max_tokens=30))
        llm.generate([[n] * 20 for n in range(5, 9)], SamplingParams(**GREEDY, max_tokens=40))
    asked = [name for n, name in enumerate(logged[0].asked) if n == 0 or logged[0].asked[n - 1] != name]
    assert "unmap" in asked
    for n, name in enumerate(asked):
        assert name != "unmap" or (asked[n - 1] == "fence" and asked[n + 1] == "map")


def test_a_mapping_that_fails_ends_no_more_than_it_must(llama, cpu, logged):
    """Nothing runs in memory that is not there: the cache begins anew, and all requests have their tokens."""
    prompts, params = [[n] * 50 for n in range(3, 7)], SamplingParams(**GREEDY, max_tokens=40)
    with LLM(llama, backend=cpu, kv_allocator="virtual", **SETTINGS) as llm:
        want = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
        first = llm.engine._core._session
        maps = logged[0].asked.count("map")
        logged[0].failing = range(maps + 7, maps + 8)
        found = llm.generate([[n] * 60 for n in range(7, 11)], SamplingParams(**GREEDY, max_tokens=100))
        assert llm.engine._core._session is not first and all(len(one.outputs[0].token_ids) == 100 for one in found)
        assert_resident_is_mapped(llm)
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, params)] == want
    with LLM(llama, backend=cpu, kv_allocator="virtual", **SETTINGS) as llm:
        maps = logged[1].asked.count("map")
        logged[1].failing = range(maps + 1, maps + 2)
        one, two = (llm.generate([prompts[0]], params)[0].outputs[0] for _ in range(2))
        assert one.finish_reason == "error" and "MemoryError: no more memory" in one.stop_reason
        assert two.token_ids == want[0]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_device_without_virtual_memory_is_refused(llama, cpu, monkeypatch):
    for settings in ({"backend": "reference"}, {"place": "layers 0: reference; rest: cpu"}):
        with pytest.raises(ConfigError, match=r"^The device .* offers no virtual memory; choose --kv-allocator paged"):
            LLM(llama, kv_allocator="virtual", **settings)
    for settings in ({"without": ("attention",)}, {"round_trip": True}):
        with pytest.raises(ConfigError, match=r"^The state kv\.0\.k is kept for references, .*; choose --kv-allocator"):
            LLM(llama, backend=cpu, kv_allocator="virtual", **settings)
    monkeypatch.setattr(CpuDevice, "virtual_memory", lambda device: None)
    with pytest.raises(ConfigError, match=r"^The device cpu .* offers no virtual memory"):
        LLM(llama, backend=cpu, kv_allocator="virtual")


def test_a_context_that_needs_more_pages_than_there_are(llama, cpu):
    page = 4 * 4096
    with pytest.raises(ConfigError, match=r"A context of 256 tokens needs .* GB of KV cache.*at most 224\)"):
        LLM(llama, backend=cpu, kv_allocator="virtual", max_model_len=256, kv_cache_memory=9 * page - 1, **SETTINGS)
    with LLM(llama, backend=cpu, kv_allocator="virtual", kv_cache_memory=9 * page, **SETTINGS) as llm:
        assert llm.loaded.memory.num_blocks == (9 * 8,) and llm.loaded.addresses.spaces == ((4 * 8 + 1) * 8,)


def test_each_of_many_short_sequences_has_a_page(llama, cpu):
    loaded = load(EngineConfig(model=llama, backend=cpu, kv_allocator="virtual", max_model_len=20, **SETTINGS))
    assert loaded.memory.num_blocks == loaded.addresses.spaces == ((4 + 1) * 8,)


def test_addresses_have_an_end(tmp_path, cpu):
    tiny_models.write_llama(tmp_path, np.random.default_rng(), max_position_embeddings=1 << 24)
    sizes = {"max_num_seqs": 4096, "kv_cache_tokens": 1 << 20, "max_model_len": 1 << 20}
    loaded = load(EngineConfig(model=tmp_path, backend=cpu, kv_allocator="virtual", **{**SETTINGS, **sizes}))
    assert loaded.addresses.spaces[0] * 4 < 1 << 31 and loaded.addresses.spaces[0] % 8 == 0
    assert loaded.addresses.spaces[0] > 400 * loaded.memory.num_blocks[0]


def test_a_session_that_cannot_map_is_told():
    with pytest.raises(BackendError, match="has no remap"):
        remap(object(), (None,))
    remap(object(), ())


@pytest.fixture
def session(llama, cpu):
    loaded = load(EngineConfig(model=llama, backend=cpu, kv_allocator="virtual", **SETTINGS))
    session = loaded.session()
    yield session
    session.close()


def step(table, copies=()):
    part = ScheduledSequence(0, 0, 4 * len(table) - 1, 1, (7,), True, (table,))
    made = ScheduledStep(0, (part,), 1, 1, (copies,), (), ())
    return StepArrays(1, HeadInputs(10)).of(made, lambda _: RowParams(Params(), 3, 0, 1))[0]


def test_a_step_in_memory_that_is_not_there_is_refused(session):
    session.remap([()], [((16, 16),)])
    assert session.submit(step((16, 17))).wait().status.tolist() == [0]
    for wrong in (step((16, 15)), step((32,)), step((16,), ((16, 32),))):
        with pytest.raises(SchedulerError, match="block of cache group 0 that has no memory"):
            session.submit(wrong)
    with pytest.raises(SchedulerError, match="has no memory"):
        session.export_blocks([(8,)])
    session.remap([((24, 8),)], [()])
    with pytest.raises(SchedulerError, match="has no memory"):
        session.submit(step((24,)))


@pytest.mark.parametrize(
    ("unmapped", "mapped"),
    [((), ((16, 8),)), (((24, 8),), ()), (((0, 8),), ()), ((), ((24, 4),)), ((), ((28, 8),)), ((), ((1 << 20, 8),))],
)
def test_nothing_is_mapped_twice_nor_in_part(session, unmapped, mapped):
    session.remap([()], [((16, 8),)])
    with pytest.raises(SchedulerError, match=r"blocks \d+ to \d+ of cache group 0 cannot be (un)?mapped"):
        session.remap([unmapped], [mapped])
    assert session.submit(step((16, 17))).wait().status.tolist() == [0]


def test_a_page_is_whole_granules_of_every_state(tmp_path, cpu):
    """Scales have a sixteenth of what keys have here, so that their granule is more tokens."""
    tiny_models.write_llama(Path(tmp_path), np.random.default_rng())
    settings = {**SETTINGS, "kv_cache_dtype": "int8"}
    loaded = load(EngineConfig(model=tmp_path, backend=cpu, kv_allocator="virtual", **settings))
    [page] = loaded.addresses.pages
    sizes = {state.name.split(".")[2]: state for state in loaded.plan.states if state.group == 0}
    nbytes = [page * int(np.prod(state.shape[1:])) * {"int8": 1, "f32": 4}[state.dtype] for state in sizes.values()]
    assert len(sizes) == 4 and all(n % 4096 == 0 for n in nbytes) and min(nbytes) == 4096
    assert loaded.memory.groups[0].page == page and loaded.memory.num_blocks[0] % page == 0
