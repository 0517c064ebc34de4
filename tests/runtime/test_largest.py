"""The largest steps run before the cache gets a device's own memory, and it gets no more than they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import thread_group

from engine import LLM, SamplingParams
from engine.backend.v1 import Dims, MemoryInfo
from engine.errors import ConfigError
from engine.program.execute import StepSession
from engine.runtime.config import EngineConfig
from engine.runtime.largest import SHARE
from engine.runtime.load import load
from engine.sampling.beam import MAX_CANDIDATES
from engine_reference import ReferenceDevice

FREE = 1 << 28
MANY = {"max_num_seqs": 4096, "kv_cache_tokens": 1 << 20, "kv_cache_dtype": "f32", "max_num_batched_tokens": 32}


class Card:
    """Memory of which the largest step seen while it is watched takes so many bytes a token, and weights nothing. ``seen``: the
    counts of each step since a device was opened."""

    def __init__(self, a_token: int) -> None:
        self.a_token = a_token
        self.seen: list[Dims] = []

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(FREE, FREE)

    def watch(self):
        first = len(self.seen)
        return lambda: self.a_token * max(dims.T for dims in self.seen[first:])


@pytest.fixture
def card(monkeypatch):
    """card(a_token, **info): the reference device becomes one with memory of its own that can be watched."""
    run = StepSession._run_exactly

    def make(a_token: int = 1 << 20, device=ReferenceDevice, **info) -> Card:
        made, describe = Card(a_token), device.describe

        def seen(session, inputs, sampled):
            assert sampled
            made.seen.append(inputs.dims)
            return run(session, inputs, sampled)

        monkeypatch.setattr(StepSession, "_run_exactly", seen)
        monkeypatch.setattr(device, "describe", lambda self: replace(describe(self), own_memory=True, **info))
        monkeypatch.setattr(device, "memory_info", lambda _: made.memory_info())
        monkeypatch.setattr(device, "watch_memory", lambda _: made.watch(), raising=False)
        return made

    return make


def test_the_cache_gets_what_the_largest_steps_leave(llama, card):
    for a_token in (0, 1 << 20, 1 << 22):
        seen = card(a_token)
        memory = load(EngineConfig(model=llama, backend="reference", **MANY)).memory
        assert memory.steps == 32 * a_token and max(dims.T for dims in seen.seen) == 32
        assert SHARE - 0.01 < memory.kv / (FREE - memory.steps) <= SHARE


@pytest.mark.parametrize(
    ("settings", "info", "want"),
    [
        ({"max_num_seqs": 5}, {}, [Dims(T=32, S=5, R=32, P=16, M=32, K=MAX_CANDIDATES)]),
        ({"max_num_seqs": 64}, {}, [Dims(T=32, S=32, R=32, P=16, M=32, K=MAX_CANDIDATES)]),
        ({"max_num_seqs": 3, "max_model_len": 16}, {}, [Dims(T=32, S=3, R=32, P=1, M=32, K=MAX_CANDIDATES)]),
        (
            {"max_num_seqs": 3, "warm_up": False},
            {"decode_buckets": (1, 4, 8)},
            [Dims(T=4, S=4, R=4, P=16, M=4, K=MAX_CANDIDATES), Dims(T=32, S=3, R=32, P=16, M=32, K=MAX_CANDIDATES)],
        ),
        (
            {"max_num_seqs": 3, "warm_up": False},
            {"buckets": (8, 64)},
            [Dims(T=64, S=4, R=32, P=16, M=32, K=MAX_CANDIDATES)],
        ),
    ],
)
def test_the_largest_steps_are_as_large_as_any_may_be(llama, card, settings, info, want):
    """In a cache of a single block, and of a history that has a slot for padding or none."""
    seen = card(**info)
    loaded = load(EngineConfig(model=llama, backend="reference", **(MANY | settings)))
    assert seen.seen == want and loaded.memory.steps == (1 << 20) * max(dims.T for dims in want)


def test_what_a_session_records_when_it_opens_is_counted(llama, card):
    seen = card(decode_buckets=(1, 4))
    load(EngineConfig(model=llama, backend="reference", **(MANY | {"max_num_seqs": 4})))
    assert [dims.T for dims in seen.seen] == [4, 1, 4, 32]


def test_answers_are_those_of_a_cache_that_was_not_measured(llama, card):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    settings = {"backend": "reference", "max_model_len": 96, "kv_cache_dtype": "f32", "max_num_seqs": 4}
    with LLM(llama, **settings) as llm:
        want = [out.outputs for out in llm.generate([[5, 6, 7], [9] * 40], params)]
    card(1 << 10, decode_buckets=(2, 4))
    with LLM(llama, **settings) as llm:
        assert llm.loaded.memory.steps
        assert [out.outputs for out in llm.generate([[5, 6, 7], [9] * 40], params)] == want


def test_a_context_that_is_too_long_is_cut_to_what_is_left(llama, card):
    """200 tokens, of which the cache may have 95 %, and the null block one of sixteen."""
    a_token = load(EngineConfig(model=llama, backend="reference", **MANY)).memory.groups[0].bytes_a_token
    card((FREE - 200 * a_token) // 32)
    loaded = load(EngineConfig(model=llama, backend="reference", **MANY))
    assert loaded.max_model_len == 160
    assert [notice for notice in loaded.notices if "limited to 160 of 256 tokens" in notice]
    with pytest.raises(ConfigError, match=r"A context of 256 tokens needs .*at most 160"):
        load(EngineConfig(model=llama, backend="reference", max_model_len=256, **MANY))


def test_a_step_without_room_is_a_sentence(llama, card, monkeypatch):
    seen = card()

    def full(session, inputs, sampled):
        raise MemoryError

    monkeypatch.setattr(StepSession, "_run_exactly", full)
    with pytest.raises(
        ConfigError, match=r"no room for a step of 32 tokens and 4096 sequences beside the weights; set"
    ):
        load(EngineConfig(model=llama, backend="reference", **MANY))
    assert not seen.seen


def test_more_than_is_left_is_refused(llama, card):
    card(1 << 20)
    left = FREE - (32 << 20)
    settings = {"model": llama, "backend": "reference", **MANY}
    assert load(EngineConfig(kv_cache_memory=left, **settings)).memory.kv <= left
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory is 0.236 GB, and beside .* the largest step .* ask for less"
    ):
        load(EngineConfig(kv_cache_memory=left + 1_000_000, **settings))


def test_ranks_run_them_together(llama, card, install):
    install("engine.backends", "threaded", "thread_group:threaded")
    seen = card(1 << 20, thread_group.ThreadedDevice)
    settings = {"backend": "threaded", "kv_cache_dtype": "f32", "max_num_batched_tokens": 32, "max_model_len": 96}
    with LLM(llama, tensor_parallel_size=2, **settings) as llm:
        assert [dims.T for dims in seen.seen] == [32, 32] and llm.loaded.memory.steps == 32 << 20
        [out] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert len(out.outputs[0].token_ids) == 3
