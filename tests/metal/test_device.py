"""The device: its memory, its traces, and decoding without growth."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from engine.backend.registry import discover
from engine.backend.v1 import Dims, MemoryInfo
from engine.errors import EngineError
from engine.runtime.llm import LLM
from engine.sampling import SamplingParams
from engine.testing.models import answers, compare_answers
from engine_metal.compile import TRACES, compile_segment
from engine_metal.device import MetalDevice

SETTINGS = {"max_model_len": 128, "max_num_seqs": 2, "block_size": 64}


@pytest.fixture
def limit():
    """Sets MLX's limits back."""
    before = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 40)
    yield
    mx.set_memory_limit(before[0]), mx.set_cache_limit(before[1])


def test_the_probe_imports_no_mlx():
    code = "import sys, engine_metal; print(engine_metal.manifest.probe()); assert 'mlx.core' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "available=True" in done.stdout


@pytest.mark.skipif(sys.platform == "darwin", reason="on a Mac it is the first choice")
def test_without_metal_it_is_never_chosen_before_another():
    found = {backend.name: backend.probe for backend in discover()}
    assert found["metal"].available and found["metal"].score < min(found["cpu"].score, found["reference"].score)
    assert "CPU" in found["metal"].reason


def test_more_than_the_working_set_is_refused(limit):
    room = 1 << 20
    device = MetalDevice({"memory_limit": mx.get_active_memory() + room})
    assert device.memory_info().free <= room
    device.alloc((room // 8,), "f32")
    with pytest.raises(MemoryError, match="working set"):
        device.alloc((room // 4 + 1,), "f32")


GROWTH = """
import json, sys
import mlx.core as mx
import psutil
from engine import LLM, SamplingParams

params = SamplingParams(temperature=0.8, seed=5, max_tokens=115, ignore_eos=True)
seen = []
with LLM(sys.argv[1], backend="metal", max_model_len=128, max_num_seqs=2, block_size=64) as llm:
    for _ in range(7):
        llm.generate([[5, 6, 7]], params)
        seen.append((mx.get_active_memory(), mx.get_cache_memory(), psutil.Process().memory_info().rss))
print(json.dumps(seen))
"""


@pytest.mark.parametrize("traced", [False, True])
def test_decoding_takes_no_more_memory_a_token(traced, llama):
    """Bytes of arrays and of a process of its own after some hundred tokens, and after some hundred more."""
    environment = {**os.environ, "ENGINE_METAL_COMPILE": str(int(traced))}
    command = [sys.executable, "-c", GROWTH, str(llama)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    active, cached, resident = zip(*json.loads(done.stdout)[2:], strict=True)
    tokens = 4 * 115  # a number of each would be seen
    assert max(active) - min(active) < tokens * 4
    assert max(cached) - min(cached) < 1 << 20
    # The graph of a token's step takes some 50 KB; the interpreter takes memory by the megabyte.
    assert resident[-1] - resident[0] < tokens * (8 << 10)


def test_traced_steps_give_the_same_answers(llama, monkeypatch):
    prompts = [np.random.default_rng().integers(3, 200, n).tolist() for n in (3, 20)]
    found = []
    for traced in "01":
        monkeypatch.setenv("ENGINE_METAL_COMPILE", traced)
        found.append(answers(llama, "metal", prompts, 40, **SETTINGS))
    compare_answers(found[1], found[0], 2e-3)


def test_traces_are_few(llama, monkeypatch):
    """A page table grows with the context; its traces are for powers of two, and no more than TRACES are kept."""
    monkeypatch.setenv("ENGINE_METAL_COMPILE", "1")
    made, asked = [], []

    def recorded(segment, limits, traced):
        body = compile_segment(segment, limits, traced)
        find = body._trace
        body._trace = lambda dims: asked.append(dims) or find(dims)
        made.append(body)
        return body

    monkeypatch.setattr("engine_metal.device.compile_segment", recorded)
    with LLM(llama, backend="metal", **{**SETTINGS, "block_size": 8}) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert {dims.P for dims in asked} == {1, 2, 4, 8}
    assert all(dims.T == dims.S == 1 for dims in asked)
    traces = {made[0]._trace(Dims(T=1, S=1, P=width)) for width in range(TRACES + 5)}
    assert len(traces) == TRACES + 5 and len(made[0]._kept.traces) == TRACES


LEFT_OPEN = """
import sys
from engine import LLM, SamplingParams

llm = LLM(sys.argv[1], backend="metal", max_model_len=128, max_num_seqs=2, block_size=64)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
"""


def test_a_process_that_traced_ends_well(llama):
    """MLX frees a thread's traces when the thread ends, with Python's lock, which an interpreter that is ending gives to no
    thread: processes aborted, some three of ten that ended beside others."""
    environment = {**os.environ, "ENGINE_METAL_COMPILE": "1"}
    command = [sys.executable, "-c", LEFT_OPEN, str(llama)]
    for _ in range(4):
        some = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(4)]
        assert [(one.communicate()[1][-500:], one.returncode) for one in some] == [("", 0)] * 4


def test_no_room_for_a_model_is_a_sentence(llama, limit, monkeypatch):
    monkeypatch.setattr("engine_metal.memory.available_memory", lambda: MemoryInfo(1 << 10, 1 << 10))
    with pytest.raises((EngineError, MemoryError), match="memory"):
        LLM(llama, backend="metal", **SETTINGS)


def test_swapped_blocks_come_back(device):
    state = device.alloc((6, 4, 2, 8), "bf16")
    rows = np.random.default_rng().integers(0, 1 << 15, (2, 4, 2, 8), np.uint16)
    state = device.import_blocks(state, np.array([4, 1], np.int32), rows)
    found = device.export_blocks(state, np.array([1, 4, 0], np.int32))
    np.testing.assert_array_equal(found[:2], rows[::-1])
    assert not found[2].any()
