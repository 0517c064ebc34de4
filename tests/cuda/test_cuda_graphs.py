"""Recorded decode steps: what they run again depends on nothing but what a step brings."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from engine.backend.registry import open_device
from engine.backend.v1 import Frame
from engine.program.execute import StepSession
from engine.runtime.config import EngineConfig
from engine.runtime.llm import LLM
from engine.runtime.load import load
from engine.sampling import SamplingParams
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint


@pytest.fixture
def recording(device, monkeypatch):
    """Decode steps of up to four sequences are recorded."""
    monkeypatch.setenv("ENGINE_CUDA_GRAPHS", "1")
    monkeypatch.setenv("ENGINE_CUDA_GRAPH_SIZES", "2,4")


class Watched:
    """Steps run again over poisoned memory, and are then recorded anew, elsewhere; what of that differs, and how many ran
    again."""

    def __init__(self, monkeypatch):
        from engine_cuda import graphs

        self._graphs = graphs
        self.different, self.again, self.recorded = [], 0, 0
        self._plain = graphs.SegmentRunner.__call__

        def step(runner, frame):
            self._step(runner, frame)

        monkeypatch.setattr(graphs.SegmentRunner, "__call__", step)

    def _step(self, runner, frame):
        given = dict(frame.values)
        kept = runner.recorded.get(runner.key(frame.dims))
        for block in runner.arena.blocks:
            block.fill_(0xFF)  # NaN, or -1
        self._plain(runner, frame)
        if not runner.takes(frame.dims):
            return
        self.recorded += kept is None
        if kept is not None:
            self.again += 1
            arena, runner.arena = runner.arena, self._graphs.Arena(runner.arena.device)
            before = {name: state.clone() for name, state in frame.states.items()}
            anew = runner.record(Frame(frame.dims, given, frame.states))
            for name, state in before.items():  # else a memory would have met the tokens twice
                frame.states[name].copy_(state)
            pairs = zip(kept.launches, anew.launches, strict=True)
            self.different += [a.name for a, b in pairs if _about(a, arena) != _about(b, runner.arena)]
            runner.arena = arena


def _about(launch, arena):
    """All that must be alike in every step that it is launched for; where a value lies is the arena's business."""

    def described(argument):
        if not hasattr(argument, "data_ptr"):
            return argument
        offsets = (argument.data_ptr() - block.data_ptr() for block in arena.blocks)
        within = [offset for block, offset in zip(arena.blocks, offsets, strict=True) if 0 <= offset < len(block)]
        return within or argument.data_ptr(), tuple(argument.shape), argument.dtype

    return launch.name, launch.grid, tuple(map(described, launch.args)), launch.meta


def _generated(folder, prompts, params, **settings):
    defaults = {"kv_cache_dtype": "f32", "max_num_seqs": 4, "max_model_len": 96, "warm_up": False}
    with LLM(folder, backend="cuda", **(defaults | settings)) as llm:
        outputs = llm.generate(prompts, params)
    return [[(o.token_ids, o.logprobs) for o in out.outputs] for out in outputs]


def _params(rng, count):
    """Some sampled, some not, each of its own length, so that steps of all sizes come."""
    return [
        SamplingParams(
            temperature=float(n % 2), seed=int(rng.integers(1000)), max_tokens=2 + 2 * n, ignore_eos=True,
            logprobs=n % 3, repetition_penalty=1 + n % 2 / 5, n=1 + (n == 2),
        )
        for n in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mixtral", "deepseek", "gpt_oss", "qwen3_5"))],
)
def test_tokens_are_those_of_steps_that_are_not_recorded(kind, recording, monkeypatch, tmp_path):
    rng = np.random.default_rng()
    folder = write_checkpoint(kind, tmp_path / kind, rng)
    prompts = models.random_prompts(rng, rng.integers(1, 40, 3).tolist())
    params = _params(rng, 3)
    watched = Watched(monkeypatch)
    got = _generated(folder, prompts, params)
    assert watched.recorded >= 4 and watched.again > watched.recorded, "body and head of two sizes, and then again"
    assert not watched.different, f"{watched.different[0]} would be launched otherwise than it was recorded"
    monkeypatch.setenv("ENGINE_CUDA_GRAPHS", "0")
    assert _generated(folder, prompts, params) == got


def test_a_launch_that_depends_on_values_is_noticed(recording, monkeypatch, tmp_path):
    from engine_cuda.ops import rows

    plain = rows.launch

    def leaking(kernel, grid, *args, **meta):
        if kernel is rows.rows.rms_norm:
            value = float(args[0].double().sum())  # the host has read; a largest one may be the same in all steps
            args = (*args[:7], args[7] + 1e-9 * value, *args[8:])  # eps
        plain(kernel, grid, *args, **meta)

    monkeypatch.setattr(rows, "launch", leaking)
    rng = np.random.default_rng()
    folder = write_checkpoint("llama", tmp_path / "llama", rng)
    watched = Watched(monkeypatch)
    _generated(folder, models.random_prompts(rng, (5,)), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert "rms_norm" in watched.different


def test_all_usual_sizes_are_recorded_when_a_session_opens(recording, monkeypatch, tmp_path):
    rng = np.random.default_rng()
    folder = write_checkpoint("llama", tmp_path / "llama", rng)
    watched = Watched(monkeypatch)
    with LLM(folder, backend="cuda", kv_cache_dtype="f32", max_num_seqs=3, max_model_len=96) as llm:
        assert llm.loaded.plan.limits.decode_buckets == (2, 4)
        warmed = watched.recorded
        assert warmed == 4
        prompts = models.random_prompts(rng, (3, 20, 7))
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert watched.recorded == warmed and watched.again >= 4


def test_the_head_s_inputs_that_came_with_the_body_s_need_not_be_as_many(recording, monkeypatch, tmp_path):
    """Page tables of several widths come with the rows that the head reads, and its key does not tell which."""
    rng = np.random.default_rng()
    folder = write_checkpoint("llama", tmp_path / "llama", rng)
    prompts, params = models.random_prompts(rng, (3, 20)), _params(rng, 2)
    watched = Watched(monkeypatch)
    got = _generated(folder, prompts, params, block_size=1, max_num_seqs=2, warm_up=True)
    assert watched.recorded >= 3 and not watched.different, "the body with 24 and with 96 blocks, and a head"
    monkeypatch.setenv("ENGINE_CUDA_GRAPHS", "0")
    assert _generated(folder, prompts, params, block_size=1, max_num_seqs=2) == got


def test_a_closed_session_keeps_no_memory(recording, tmp_path):
    """Though somebody, a rank that opens the next one, still refers to it: recorded launches have states as arguments."""
    folder = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    loaded = load(EngineConfig(model=folder, backend="cuda", kv_cache_dtype="f32", max_num_seqs=2, max_model_len=64))
    session = loaded.session()
    states = [weakref.ref(state) for place in session._states.values() for state in place.values()]
    assert len(states) == len(loaded.plan.states)
    session.close()
    assert not [state for state in states if state() is not None]


def test_where_steps_cannot_be_captured_they_are_launched(recording, monkeypatch, tmp_path):
    """And the device says why."""
    from engine_cuda import graphs

    def failing(launches, device):
        raise RuntimeError("operation not permitted")

    rng = np.random.default_rng()
    folder = write_checkpoint("llama", tmp_path / "llama", rng)
    prompts, params = models.random_prompts(rng, (3, 9)), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    want = _generated(folder, prompts, params)
    monkeypatch.setattr(graphs, "one_by_one", failing)
    with LLM(folder, backend="cuda", kv_cache_dtype="f32", max_num_seqs=4, max_model_len=96, warm_up=False) as llm:
        outputs = llm.generate(prompts, params)
        told = llm.loaded.device.describe().details["graphs"]
    assert told == "off: a step could not be captured (operation not permitted)."
    assert [[(o.token_ids, o.logprobs) for o in out.outputs] for out in outputs] == want


def test_nobody_waits_for_the_whole_gpu_while_a_graph_is_captured(device, monkeypatch):
    """As another model of the process does while it is loaded: CUDA refuses that, and the capture ends, too."""
    import torch

    from engine_cuda import graphs, memory

    where, events, threads = torch.device("cuda", 0), [], []

    class Graph:
        def capture_begin(self, capture_error_mode):
            for wait in (memory.wait_for, memory.memory_of):
                threads.append(threading.Thread(target=wait, args=(where,)))
                threads[-1].start()
            threads[-1].join(0.1)
            events.append("captured")

        def capture_end(self):
            events.append("ended")

        replay = None

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, function in {
        "CUDAGraph": Graph,
        "current_stream": lambda where: stream,
        "Stream": lambda where: stream,
        "stream": lambda side: nullcontext(),
        "synchronize": lambda where: events.append("waited"),
        "empty_cache": lambda: events.append("emptied"),
        "mem_get_info": lambda where: (0, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    graphs.captured((), where)
    for thread in threads:
        thread.join()
    assert events[:2] == ["captured", "ended"] and sorted(events[2:]) == ["emptied", "waited"]


def test_only_so_many_are_kept(recording, monkeypatch, tmp_path):
    from engine_cuda import graphs

    monkeypatch.setattr(graphs, "KEPT", 1)
    monkeypatch.setenv("ENGINE_CUDA_GRAPH_SIZES", "1,2")
    rng = np.random.default_rng()
    folder = write_checkpoint("llama", tmp_path / "llama", rng)
    prompts, params = models.random_prompts(rng, (3, 9)), _params(rng, 2)
    kept = []
    plain = graphs.SegmentRunner.__call__

    def counted(runner, frame):
        plain(runner, frame)
        kept.append(len(runner.recorded))

    monkeypatch.setattr(graphs.SegmentRunner, "__call__", counted)
    got = _generated(folder, prompts, params)
    assert max(kept) == 1
    monkeypatch.setenv("ENGINE_CUDA_GRAPHS", "0")
    assert _generated(folder, prompts, params) == got


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "off: kernels run in Triton's interpreter"),
        ({"graphs": "0"}, "off: the option graphs says so"),
        ({"graphs": 1, "graph_sizes": "8,1"}, "decode steps of 1, 8 sequences are launched again one by one"),
    ],
)
def test_the_device_says_what_is_recorded(options, words, device):
    info = open_device("cuda", options).describe()
    assert words in info.details["graphs"]
    assert info.decode_buckets == ((1, 8) if "decode" in words else ())


@pytest.mark.parametrize("options", [{"graphs": "maybe"}, {"graph_sizes": "0,4"}, {"graph_sizes": ""}])
def test_options_that_cannot_be_are_refused(options, device):
    from engine_cuda.graphs import graphs_of

    with pytest.raises(ValueError, match=r"graphs is 0 or 1|sizes of at least 1"):
        graphs_of(options)


def test_the_host_is_a_step_behind(recording, monkeypatch, tmp_path):
    """Decode steps are submitted before the last one has ended: their tokens come from the device's history."""
    rng = np.random.default_rng()
    folder = write_checkpoint("llama", tmp_path / "llama", rng)
    prompts, params = models.random_prompts(rng, (3, 9)), _params(rng, 2)
    unknown = []
    submit = StepSession.submit

    def counted(session, inputs):
        unknown.append(int((inputs.arrays["token_ids"] < 0).sum()))
        return submit(session, inputs)

    monkeypatch.setattr(StepSession, "submit", counted)
    got = _generated(folder, prompts, params)
    assert sum(unknown) >= 4
    from engine.runtime.core import EngineCore

    add = EngineCore.add
    monkeypatch.setattr(
        EngineCore, "add", lambda core, *requests: (setattr(core, "_max_in_flight", 1), add(core, *requests))
    )
    unknown.clear()
    assert _generated(folder, prompts, params) == got
    assert not sum(unknown)
