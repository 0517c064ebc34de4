"""Whatever a sequence goes through for want of memory (computed again, swapped out and in, moved, its blocks behind a window
given back): the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_models
from memory_limit import limited_memory

from engine import LLM, SamplingParams
from engine.backend.v1 import MemoryInfo
from engine.errors import ConfigError, EngineError, KVCacheError, SchedulerError
from engine.kv import find_allocator, find_predictor
from engine.program.execute import swap_refusal
from engine.runtime import load
from engine.runtime.config import EngineConfig
from engine_reference import ReferenceDevice

WINDOW = 24
LIMITED = {"sliding_window": WINDOW, "use_sliding_window": True}
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
MODELS = {
    "full": {},
    "window": {"model_type": "mistral", "sliding_window": WINDOW},
    "mixed": {"model_type": "qwen2", **LIMITED, **MIXED},
}
CONTEXT = 190
TIGHT = {"block_size": 4, "max_model_len": CONTEXT, "max_num_batched_tokens": 16, "max_num_seqs": 16}
SWAP = {"preemption": "swap"}
CONTIGUOUS = {"kv_allocator": "contiguous"}
VIRTUAL = {"kv_allocator": "virtual"}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny_models.write_llama(folder, np.random.default_rng(4), **MODELS[request.param])
    return folder


def requests():
    rng = np.random.default_rng(11)
    shared = rng.integers(3, 320, 40).tolist()
    prompts, params = [], []
    for n in range(12):
        own = rng.integers(3, 320, int(rng.choice([1, 2, 15, 17, 33, 50, 90]))).tolist()
        prompts.append(shared + own if n % 3 == 0 else own)
        kind = {"temperature": 0.0} if n % 2 else {"temperature": 0.9, "seed": n, "repetition_penalty": 1.2}
        params.append(SamplingParams(**kind, max_tokens=int(rng.integers(10, 56)), ignore_eos=True, n=1 + (n % 5 == 0)))
    return prompts, params


def crowd(model, backend, **settings):
    """The tokens of all requests together, the scheduler's counts, and the allocator."""
    with LLM(model, backend=backend, threads=2, kv_cache_dtype="f32", **settings) as llm:
        outputs = llm.generate(*requests())
        scheduler = llm.engine._core.scheduler
        stats = scheduler.stats()
        assert all(pool.used == 0 for pool in stats.pools)
        assert stats.host is None or stats.host.used == 0
        assert not llm.engine._core._host._contents
        return [[c.token_ids for c in out.outputs] for out in outputs], stats, scheduler.allocator


@pytest.fixture(scope="module")
def roomy(model):
    return crowd(model, "reference")[0]


def little(model, backend, **settings):
    """KV memory for hardly more than one whole context, or for a few that hold no more than a window."""
    with LLM(model, backend=backend, kv_cache_dtype="f32", **TIGHT, **settings) as llm:
        memory = llm.loaded.memory
        spare = 24 if memory.groups[0].window else max(4, 2 * memory.groups[0].page)
        return memory.sequence_kv + spare * sum(memory.block_bytes)


@pytest.mark.parametrize("settings", [{}, SWAP, CONTIGUOUS, CONTIGUOUS | SWAP], ids=str)
def test_little_memory_changes_no_token(model, backend, roomy, settings):
    check_little(model, backend, roomy, settings)


@pytest.mark.parametrize("settings", [VIRTUAL, VIRTUAL | SWAP], ids=str)
def test_little_memory_that_is_mapped_changes_no_token(model, cpu, roomy, settings):
    check_little(model, cpu, roomy, settings)


def check_little(model, backend, roomy, settings):
    memory = little(model, backend, **settings)
    tokens, stats, allocator = crowd(model, backend, kv_cache_memory=memory, **TIGHT, **settings)
    assert tokens == roomy
    assert stats.preemptions >= 3
    assert (stats.swaps > 0) == (settings.get("preemption") == "swap")
    if "kv_allocator" in settings:
        allocator.check()


def test_a_swap_space_for_few_is_shared_with_recomputation(model, cpu, roomy):
    memory = little(model, cpu)
    space = memory / 5 / 2**30
    tokens, stats, _ = crowd(model, cpu, kv_cache_memory=memory, **TIGHT, **SWAP, swap_space=space)
    assert tokens == roomy and 0 < stats.swaps < stats.preemptions


def test_a_window_takes_less_memory(tmp_path):
    """A pool far smaller than the context, where only the window and a chunk are held at a time."""
    tiny_models.write_llama(tmp_path, np.random.default_rng(4), model_type="mistral", sliding_window=WINDOW)
    settings = {"block_size": 4, "max_num_batched_tokens": 16, "kv_cache_dtype": "f32", "max_num_seqs": 2}
    prompt, params = list(range(3, 183)), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(tmp_path, backend="reference", **settings) as llm:
        expected = llm.generate([prompt], params)[0].outputs[0].token_ids
        [group], memory = llm.loaded.memory.groups, llm.loaded.memory
    assert group.sequence_blocks == 11 and group.window == WINDOW  # 24 + 16 - 1 tokens, not at a block's beginning
    assert memory.sequence_kv * 64 == memory.sequence_kv_unwindowed * 11
    with LLM(tmp_path, backend="reference", kv_cache_memory=12 * memory.block_bytes[0], **settings) as llm:
        assert llm.loaded.memory.num_blocks == (12,) and llm.loaded.max_model_len == 256 and not llm.loaded.notices
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected
        warm = llm.generate([prompt[:40]], params)[0]
        assert warm.num_cached_tokens == 0, "the prompt's first blocks are long gone"


def test_a_window_is_hit_by_its_last_blocks_alone(tmp_path):
    tiny_models.write_llama(tmp_path, np.random.default_rng(4), model_type="mistral", sliding_window=WINDOW)
    settings = {"block_size": 4, "max_num_batched_tokens": 16, "kv_cache_dtype": "f32", "max_num_seqs": 2}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = list(range(3, 183))
    with LLM(tmp_path, backend="reference", kv_cache_tokens=256, **settings) as llm:
        assert llm.loaded.memory.num_blocks == (23,)
        cold = llm.generate([prompt], params)[0]
        warm = llm.generate([prompt], params)[0]
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 176)
        assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


def test_a_device_without_block_access_cannot_swap(model, cpu, monkeypatch):
    import engine_cpu.device

    monkeypatch.delattr(engine_cpu.device.CpuDevice, "export_blocks")
    with pytest.raises(ConfigError, match=r"offers no export_blocks and import_blocks.*--preemption recompute"):
        LLM(model, backend=cpu, preemption="swap")
    with LLM(model, backend="reference") as llm:
        assert swap_refusal(llm.loaded.device, llm.loaded.plan) is None, "its states go through the host with every op"


def test_more_swap_space_than_the_host_has_is_refused(llama, monkeypatch):
    """Beside weights and cache, where these are the host's, too."""
    free = 1 << 30
    monkeypatch.setattr(load, "available_memory", lambda: MemoryInfo(free, free))
    settings = {"model": llama, "backend": "reference", "preemption": "swap", "kv_cache_memory": free // 4}
    settings |= {"kv_cache_tokens": 1 << 20, "max_num_seqs": 4096, "kv_cache_dtype": "f32"}
    loaded = load.load(EngineConfig(**settings, swap_space=0.7))
    assert loaded.memory.swap == int(0.7 * free) and loaded.memory.kv > 0.2 * free
    assert loaded.scheduler().stats().host.total == loaded.memory.swap
    with pytest.raises(
        ConfigError, match=r"swap_space is 0.8 GiB, and 0.7\d* GiB of the host's memory are free for it; set"
    ):
        load.load(EngineConfig(**settings, swap_space=0.8))
    describe = ReferenceDevice.describe
    monkeypatch.setattr(ReferenceDevice, "describe", lambda self: replace(describe(self), own_memory=True))
    assert load.load(EngineConfig(**settings, swap_space=1.0)).memory.swap == free
    with pytest.raises(ConfigError, match=r"swap_space is 1.1 GiB, and 1 GiB .*--preemption recompute"):
        load.load(EngineConfig(**settings, swap_space=1.1))
    assert load.load(EngineConfig(**(settings | {"preemption": "recompute"}), swap_space=1.1)).memory.swap == 0


def test_settings_are_checked(llama, tmp_path):
    with pytest.raises(ConfigError, match="no preemption 'never'; choose one of recompute, swap"):
        LLM(llama, preemption="never")
    for space in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="swap space"):
            LLM(llama, preemption="swap", swap_space=space)
    with pytest.raises(KVCacheError, match="There is no KV allocator 'slab'; known are: contiguous, paged, virtual"):
        LLM(llama, kv_allocator="slab")
    with pytest.raises(SchedulerError, match="There is no scheduling policy 'first'; known are: fcfs, priority"):
        LLM(llama, policy="first")
    for wrong in ({"policy": "first"}, {"kv_allocator": "slab"}, {"length_predictor": "oracle"}):
        with pytest.raises(EngineError, match="known are"):  # before it is seen that there is no model
            LLM(tmp_path, **wrong)
    for nowhere in (tmp_path / "none", "owner/none"):
        with pytest.raises(ConfigError, match="block size is 3"):
            LLM(nowhere, block_size=3)
    with pytest.raises(KVCacheError, match="There is no length predictor 'oracle'; known are: histogram"):
        LLM(llama, length_predictor="oracle")


OUTSIDERS = """
from engine.kv import AllocatorManifest, PagedAllocator


class Counting(PagedAllocator):
    opened = 0

    def open(self, seq_id, limit, salt=b"", prompt=0):
        Counting.opened += 1
        super().open(seq_id, limit, salt, prompt)


class Twenty:
    seen = []

    def predict(self, prompt, output):
        return max(20, output + 1)

    def observe(self, prompt, output):
        self.seen.append((prompt, output))


manifest = AllocatorManifest("counting", lambda spec: Counting(spec.groups, spec.num_blocks, spec.max_chunk))
no_manifest = Counting
"""


def test_an_outsiders_allocator_and_predictor_are_found_and_used(llama, install):
    install("engine.kv_allocators", "counting", "outsiders_for_kv:manifest", OUTSIDERS)
    install("engine.length_predictors", "twenty", "outsiders_for_kv:Twenty")
    install("engine.kv_allocators", "wrong", "outsiders_for_kv:no_manifest")
    assert find_allocator("counting").name == "counting" and not find_allocator("counting").contiguous
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(llama, backend="reference", kv_allocator="counting") as llm:
        llm.generate([[5, 6], [7]], params)
        assert type(llm.engine._core.scheduler.allocator).opened == 2
    with LLM(llama, backend="reference", kv_allocator="contiguous", length_predictor="twenty") as llm:
        llm.generate([[5, 6], [7]], params)
    # The last token of each was sampled and never computed.
    assert sorted(type(find_predictor("twenty")).seen) == [(1, 4), (2, 4)]
    with pytest.raises(KVCacheError, match="'wrong' gives no AllocatorManifest"):
        LLM(llama, backend="reference", kv_allocator="wrong")


def test_contiguity_is_a_feature_that_attention_is_told(llama, backend):
    with LLM(llama, backend=backend, kv_allocator="contiguous") as llm:
        calls = [placed.call for placed in llm.loaded.placement.calls if placed.call.op == "attention"]
        assert calls and all(call.attrs["contiguous"] for call in calls)
        assert not llm.loaded.placement.fallbacks()


def test_no_room_for_the_cache_is_told(tmp_path, cpu):
    tiny_models.write_llama(tmp_path, np.random.default_rng(), max_position_embeddings=1 << 24)
    with limited_memory(512 << 20), pytest.raises(ConfigError, match=r"There is no room for \d.* GB of KV cache"):
        LLM(tmp_path, backend=cpu, threads=1)
