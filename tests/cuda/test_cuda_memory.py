"""What is taken of a GPU's memory: by the largest steps of the kernels themselves, and as a card that tests play tells it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.runtime.config import EngineConfig
from engine.runtime.llm import LLM
from engine.runtime.load import load
from engine.sampling import SamplingParams
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint


class Card:
    """Memory of a GPU: what the driver has given to torch, of which some is in use, and to others."""

    def __init__(self, monkeypatch, torch):
        self.total, self.reserved, self.most, self.used, self.others = 1000, 0, 0, 0, 100
        for name, function in {
            "synchronize": lambda where: None,
            "empty_cache": self.empty,
            "mem_get_info": lambda where: (self.total - self.reserved - self.others, self.total),
            "memory_reserved": lambda where: self.reserved,
            "max_memory_reserved": lambda where: self.most,
            "reset_peak_memory_stats": self.reset,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def take(self, count):
        """As torch does: of what it keeps, or of the driver."""
        self.used += count
        self.reserved = max(self.reserved, self.used)
        self.most = max(self.most, self.reserved)

    def give(self, count):
        self.used -= count

    def empty(self):
        self.reserved = self.used

    def reset(self, where):
        self.most = self.reserved


@pytest.fixture
def played(device, monkeypatch):
    import torch

    return Card(monkeypatch, torch)


def test_what_torch_keeps_is_given_back_before_it_is_told(played):
    from engine_cuda.memory import memory_of

    played.take(500)
    played.give(300)
    info = memory_of(None)
    assert (info.total, info.free) == (1000, 700) and played.reserved == 200


def test_what_torch_and_the_driver_take_is_told(played):
    from engine_cuda.memory import watch

    played.take(300)  # weights
    played.give(100)
    taken = watch(None)
    assert played.reserved == 200 and taken() == 0
    played.take(150)
    played.give(150)
    assert taken() == 150, "it is kept, and will be needed again"
    played.others += 30  # kernels and graphs
    assert taken() == 180
    played.others -= 90  # another program ends
    assert taken() == 150, "what others give back is not ours"
    played.empty()
    assert taken() == 150 and played.reserved == 200, "the most there was"


@pytest.mark.parametrize(("count", "at_a_time"), [(7, 3), (6, 2), (0, 1), (5, 100)])
def test_blocks_that_are_swapped_take_little_memory(count, at_a_time, device, monkeypatch):
    """Of a long sequence they are many, and the cache has filled the GPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from engine_cuda import arrays

    made = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), named=None):
            result = function(*given, **(named or {}))
            if function.overloadpacket is torch.ops.aten.index:
                made.append(len(result))
            return result

    rng = np.random.default_rng()
    plain = rng.standard_normal((9, 4, 2, 8), np.float32)
    monkeypatch.setattr(arrays, "AT_A_TIME", at_a_time * plain[0].nbytes + 1)
    state, blocks = device.copy_in(plain), rng.permutation(9)[:count].astype(np.int32)
    with Watched():
        rows = device.export_blocks(state, blocks)
        assert max(made, default=0) <= at_a_time and sum(made) == count
        other = device.import_blocks(device.alloc(plain.shape, "f32"), blocks, rows)
    assert np.array_equal(rows, plain[blocks]) and np.array_equal(device.copy_out(other)[blocks], rows)


@pytest.fixture
def as_a_card(device, monkeypatch):
    """The device has memory of its own; gives the bytes of values that each step makes, while it is watched and after."""
    from engine_cuda import graphs, operands, recording
    from engine_cuda.device import CudaDevice
    from engine_cuda.ops import dense

    watched, after, now = [], [], []
    empty, step, describe = recording.empty, graphs.SegmentRunner.__call__, CudaDevice.describe

    def counted(shape, dtype, where):
        value = empty(shape, dtype, where)
        now.append(value.nbytes)
        return value

    def run(runner, frame):
        now.clear()
        step(runner, frame)
        (after if done else watched).append((runner._segment.name, sum(now)))

    done = []

    def watch(_):
        done.clear()
        return lambda: done.append(True) or 1 << 20

    monkeypatch.setattr(operands.recording, "empty", counted)
    monkeypatch.setattr(dense, "empty", counted)
    monkeypatch.setattr(graphs.SegmentRunner, "__call__", run)
    monkeypatch.setattr(CudaDevice, "describe", lambda self: replace(describe(self), own_memory=True))
    monkeypatch.setattr(CudaDevice, "watch_memory", watch)
    return watched, after


@pytest.mark.parametrize("kind", ["llama", pytest.param("deepseek", marks=pytest.mark.slow)])
@pytest.mark.parametrize("graphs", ["0", "1"])
def test_no_step_makes_more_than_the_largest(kind, graphs, as_a_card, monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINE_CUDA_GRAPHS", graphs)
    monkeypatch.setenv("ENGINE_CUDA_GRAPH_SIZES", "2,4")
    watched, after = as_a_card
    rng = np.random.default_rng()
    folder = write_checkpoint(kind, tmp_path / kind, rng)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 64, "warm_up": False}
    with LLM(folder, backend="cuda", kv_cache_dtype="f32", **settings) as llm:
        assert llm.loaded.memory.steps == 1 << 20
        llm.generate(models.random_prompts(rng, rng.integers(1, 40, 6).tolist()), params)
    assert len(after) > 8
    for name in {name for name, _ in after}:
        assert max(n for one, n in watched if one == name) >= max(n for one, n in after if one == name)


def test_matrices_are_joined_before_the_cache_gets_the_rest(as_a_card, monkeypatch, tmp_path):
    """And not when a session binds them, beside a cache that has nearly all memory."""
    import torch

    folder = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    joined, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *more: joined.append(len(parts)) or cat(parts, *more))
    loaded = load(EngineConfig(model=folder, backend="cuda", kv_cache_dtype="f32", max_num_seqs=2, max_model_len=64))
    assert loaded.memory.steps and joined
    joined.clear()
    loaded.session().close()
    assert not joined


def test_a_cache_of_mapped_memory_is_measured_too(as_a_card, monkeypatch, tmp_path):
    from engine.backend.v1 import MemoryInfo
    from engine_cuda.device import CudaDevice

    monkeypatch.setattr(CudaDevice, "memory_info", lambda _: MemoryInfo(1 << 26, 1 << 26))
    folder = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    settings = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 16, "kv_allocator": "virtual"}
    with LLM(folder, backend="cuda", kv_cache_dtype="f32", **settings) as llm:
        assert llm.loaded.memory.steps == 1 << 20 and llm.loaded.plan.pages
        [out] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert len(out.outputs[0].token_ids) == 3
