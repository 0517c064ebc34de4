"""Segments, packing and the plan's sizes."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import tiny_models
from fake_device import EVERY_OP, FakeDevice, provider
from hypothesis import given
from hypothesis import strategies as st

from engine import LLM
from engine.backend.v1 import HOST_DTYPES, DeviceInfo, MemoryInfo
from engine.errors import ConfigError
from engine.formats import open_checkpoint
from engine.kv import CacheGroup
from engine.models import load_model
from engine.program.pack import Packing
from engine.program.place import Placer
from engine.program.plan import Pools, check_device, kv_bytes_a_block, make_limits, make_plan
from engine.program.reference import ReferenceProvider
from engine.program.segments import segments
from engine.runtime.config import EngineConfig
from engine.runtime.load import load
from engine_reference import ReferenceDevice

RESULTS = {"tokens", "status", "logprob", "top_ids", "top_logprobs"}


def placed(program, *missing, **settings):
    return Placer(FakeDevice.of(*(op for op in EVERY_OP if op not in missing))).place(program, **settings)


def all_segments(placement, keep=()):
    body, head, embedding = segments(placement, Packing(placement).weights, keep)
    return body, head, embedding, (*body, *head, *embedding)


# -- segments ----------------------------------------------------------------------------------------------------------


def test_one_device_is_one_segment_for_body_head_and_embedding_each(program):
    body, head, embedding, found = all_segments(placed(program))
    names = [("body.0", "device"), ("head.1", "device"), ("embedding.2", "device")]
    assert [(s.name, s.place) for s in found] == names
    assert {v.name for v in head[0].outputs} == RESULTS
    assert {v.name for v in body[0].outputs} == {"hidden", "positions", "token_seq", "output_norm"}
    assert [v.name for v in embedding[0].inputs] == ["output_norm", "embedding_rows"]
    assert [v.name for v in embedding[0].outputs] == ["embeddings"]


@pytest.mark.parametrize("missing", [(), ("rope",), ("attention", "embed"), ("linear", "linear_group"), ("sample",)])
def test_inputs_and_outputs_meet(program, missing):
    placement = placed(program, *missing)
    *_, found = all_segments(placement)
    assert [call.call for s in found for call in s.calls] == [p.call for p in placement.calls], "nothing lost, in order"
    available = {v.id for v in program.inputs}
    for before, segment in zip([None, *found], found, strict=False):
        if before is not None and before.name[:4] == segment.name[:4]:
            assert before.place != segment.place, "runs are maximal"
        assert {v.id for v in segment.inputs} <= available
        made = {v.id for call in segment.calls for v in call.call.outputs}
        read = {v.id for call in segment.calls for v in call.call.inputs.values()}
        assert {v.id for v in segment.inputs} == read - made
        assert {v.id for v in segment.outputs} <= made
        available |= {v.id for v in segment.outputs}
    results = {v.id for s in found[-2:] for v in s.outputs if v.name in RESULTS | {"embeddings"}}
    used_later = {v.id for s in found for v in s.inputs} | results
    for segment in found:
        assert {v.id for v in segment.outputs} <= used_later, "nothing leaves that nobody needs"


def test_kept_values_leave(program):
    *_, found = all_segments(placed(program), keep=("logits", "attention.1"))
    assert "attention.1" in {v.name for v in found[0].outputs}
    assert {v.name for v in found[1].outputs} == RESULTS | {"logits"}


# -- packing -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    tensors = tiny_models.llama_tensors(np.random.default_rng(2), tiny_models.CONFIG)
    del tensors["lm_head.weight"]
    tiny_models.write_llama(folder, np.random.default_rng(2), tensors, tie_word_embeddings=True)
    return load_model(open_checkpoint(folder)).program(16, "f16")


def test_each_weight_is_packed_once_with_all_its_uses(tied):
    device = FakeDevice.of(*EVERY_OP)
    everything = Packing(Placer(device).place(tied)).weights
    packs = [p for providers in device.offered.values() for one in providers for p in one.packs]
    names = [name for name, _ in packs]
    assert len(names) == len(set(names)) == len(everything)
    uses = dict(packs)
    assert sorted(uses["token_embd.weight"]) == ["embed", "linear"], "embedding and tied head are one"
    assert uses["rope.inv_freq"] == ("rope_kv_write",) * 2
    assert uses["blk.0.attn_q.weight"] == ("linear_group",)


def test_providers_of_different_packers_pack_for_themselves(tied):
    device = FakeDevice.of(*EVERY_OP)
    device.offered["embed"] = [provider("embed", packer="rows")]
    everything = Packing(Placer(device).place(tied)).weights
    assert {packer for _, packer, name in everything if name == "token_embd.weight"} == {"fake", "rows"}


def test_a_tied_weight_counts_once_in_the_plan(tied):
    placement = placed(tied)
    limits = make_limits(64, 8, 256, 16, 4)
    packed = Packing(placement).weights
    _, memory = make_plan(placement, packed, "f16", (20,), limits)
    assert memory.weights == sum(
        ref.dense().nbytes for ref in {w.name: w for p in placement.calls for w in p.call.weights.values()}.values()
    )


def test_progress_reaches_the_end(program):
    seen = []
    Packing(placed(program), lambda done, total: seen.append((done, total))).finish()
    totals = {total for _, total in seen}
    assert len(totals) == 1 and seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bytes_a_value", "scales"),
    [("f32", 4, 0), ("f16", 2, 0), ("bf16", 2, 0), ("int16", 2, 4), ("int8", 1, 4), ("fp8", 1, 0)],
)
@pytest.mark.parametrize("block_size", [8, 32])
def test_the_plan_allocates_what_it_says(model, dtype, bytes_a_value, scales, block_size):
    program = model.program(block_size, dtype)
    placement = placed(program)
    # Two layers, keys and values, two heads of 16.
    a_token = 2 * 2 * 2 * (16 * bytes_a_value + scales)
    assert kv_bytes_a_block(program, placement, dtype) == {"device": (a_token * block_size,)}
    limits = make_limits(64, 8, 250, block_size, 4)
    plan, memory = make_plan(placement, Packing(placement).weights, dtype, (21,), limits)
    assert memory.kv == 21 * block_size * a_token
    [group] = memory.groups
    assert (group.blocks, group.block_size, group.bytes_a_token) == (21, block_size, a_token)
    assert memory.num_blocks == (21,) and memory.block_bytes == (a_token * block_size,)
    assert memory.sequence_kv == memory.sequence_kv_unwindowed == -(-250 // block_size) * block_size * a_token
    assert memory.history == 8 * 250 * 4
    sizes = {s.name: prod(s.shape) * HOST_DTYPES[s.dtype].itemsize for s in plan.states}
    assert sum(size for name, size in sizes.items() if name != "history") == memory.kv
    assert sizes["history"] == memory.history
    assert set(sizes) == set(plan.state_places)
    assert {8: 32, 32: 8}[block_size] == limits.dims.P


@st.composite
def pools(draw):
    """Full groups and windows, of one or several block sizes."""
    count = draw(st.integers(1, 3))
    groups = []
    for n in range(count):
        window = draw(st.none() | st.integers(1, 3000))
        groups.append(
            CacheGroup(f"g{n}", "window" if window else "full", draw(st.sampled_from([1, 8, 16, 32])), window)
        )
    sizes = tuple(draw(st.integers(1, 5000)) for _ in groups)
    return Pools(
        tuple(groups),
        sizes,
        draw(st.integers(0, 10_000_000)),
        draw(st.integers(1, 64)),
        draw(st.integers(1, 600)),
        tuple(draw(st.sampled_from([1, 1, 4, 64])) for _ in groups),
    )


@given(pools(), st.integers(1, 100_000), st.integers(1, 4000))
def test_pools(pools, wanted, longest):
    wanted = max(wanted, longest)
    whole = [-(-group.most_blocks(longest, pools.chunk) // page) * page for group, page in pools.paged]
    needed = [blocks + page for blocks, (_, page) in zip(whole, pools.paged, strict=True)]
    assert tuple(needed) == pools.needed(longest)
    try:
        blocks = pools.choose(wanted, longest)
    except ConfigError as error:
        assert pools.bytes(tuple(needed)) > pools.budget, "one whole sequence would have fitted"
        sentence = str(error)
        assert str(longest) in sentence and "--kv-dtype" in sentence
        possible = pools.longest(longest)
        assert (f"at most {possible})" in sentence) == (possible > 0) == ("--max-context" in sentence)
        assert pools.bytes(pools.needed(possible)) <= pools.budget or possible == 0
        return
    assert pools.bytes(blocks) <= pools.budget
    assert all(a >= b for a, b in zip(blocks, needed, strict=True)), "besides the null blocks a whole sequence fits"
    most = pools.wanted(wanted, longest)
    assert all(a <= b for a, b in zip(blocks, most, strict=True))
    if blocks != most and len(blocks) == 1 and pools.groups[0].window is None:
        assert (blocks[0] + pools.pages[0]) * pools.block_bytes[0] > pools.budget
    for (group, page), count, one in zip(pools.paged, most, whole, strict=True):
        assert count % page == 0 and count <= max(group.blocks(wanted) + page - 1, one) + page
        if group.window is not None or page > 1:
            assert count <= pools.sequences * one + page


def test_pools_hold_the_null_block_besides_what_is_wanted():
    groups = (CacheGroup("full", "full", 16), CacheGroup("swa", "window", 16, 32))
    pools = Pools(groups, (1, 1), budget=10**6, sequences=2, chunk=16, pages=(1, 1))
    assert pools.wanted(320, 160) == (320 // 16 + 1, 2 * 4 + 1)  # a window and a chunk may touch four blocks


def test_a_context_that_the_memory_cannot_hold(llama):
    with pytest.raises(ConfigError, match=r"A context of 256 tokens needs .* GB of KV cache.*choose another --kv-d"):
        LLM(llama, backend="reference", max_model_len=256, kv_cache_memory=1000)
    with pytest.raises(ConfigError, match=r"A context of 256 tokens needs .* GB of KV cache.*at most 64\)"):
        LLM(llama, backend="reference", max_model_len=256, kv_cache_dtype="f16", kv_cache_memory=256 * 5 * 16)
    with pytest.raises(ConfigError, match=r"max_model_len is 257.*at most 256 tokens"):
        LLM(llama, backend="reference", max_model_len=257)
    with LLM(llama, backend="reference", kv_cache_dtype="f16", kv_cache_memory=256 * 5 * 16) as llm:
        assert llm.loaded.max_model_len == 64
        assert any("limited to 64 of 256 tokens" in notice for notice in llm.loaded.notices)


def test_a_cache_smaller_than_a_context_is_told(llama):
    for tokens, told in ((3, True), (256, False), (None, False)):
        loaded = load(EngineConfig(model=llama, backend="reference", kv_cache_tokens=tokens))
        said = "The KV cache holds 256 tokens and not 3: it has room for one whole context"
        assert any(said in notice for notice in loaded.notices) == told


def test_a_device_with_memory_of_its_own_gives_the_cache_most_of_it(llama, monkeypatch):
    def opened(free, info, **settings):
        monkeypatch.setattr(ReferenceDevice, "memory_info", lambda _: MemoryInfo(free, free))
        monkeypatch.setattr(ReferenceDevice, "describe", lambda _: info)
        return load(EngineConfig(model=llama, backend="reference", **settings))

    shared = DeviceInfo("host", "reference")
    own = replace(shared, own_memory=True, step_tokens=96)
    crowd = opened(1 << 40, shared, max_num_seqs=1024)
    assert crowd.plan.limits.dims.T == 512 and crowd.memory.num_blocks == (64 * 1024 // 16 + 1,)
    crowd = opened(1 << 40, own, max_num_seqs=1024)
    assert crowd.plan.limits.dims.T == 96 and crowd.memory.num_blocks == (1024 * 256 // 16 + 1,)
    assert opened(1 << 40, own, max_num_batched_tokens=7).plan.limits.dims.T == 7
    free, many = 1 << 28, {"max_num_seqs": 4096, "kv_cache_tokens": 1 << 20, "kv_cache_dtype": "f32"}
    for info, share in ((shared, 0.5), (own, 0.85)):
        assert share - 0.01 < opened(free, info, **many).memory.kv / free <= share


def test_the_cache_gets_what_packed_weights_leave(llama, monkeypatch):
    """And not what they leave as they lie in their file, which may be less."""
    free, each = 1 << 28, 1 << 22
    own = DeviceInfo("host", "reference", own_memory=True)
    monkeypatch.setattr(ReferenceDevice, "memory_info", lambda _: MemoryInfo(free, free))
    monkeypatch.setattr(ReferenceDevice, "describe", lambda _: own)
    many = {"max_num_seqs": 4096, "kv_cache_tokens": 1 << 20, "kv_cache_dtype": "f32"}
    config = EngineConfig(model=llama, backend="reference", **many)
    monkeypatch.setattr(ReferenceProvider, "packed_bytes", lambda self, ref: each, raising=False)
    loaded = load(config)
    left = free - each * len(loaded.packing.weights)
    assert 0 < left < 0.9 * free and 0.84 < loaded.memory.kv / left <= 0.85
    monkeypatch.setattr(ReferenceProvider, "packed_bytes", lambda self, ref: free)
    with pytest.raises(
        ConfigError, match=r"The weights take .* GB on host, and 0.268 GB are free there; choose a smaller"
    ):
        load(config)


def test_no_room_for_weights_is_a_sentence(llama, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(ReferenceProvider, "pack", full)
    with pytest.raises(ConfigError, match=r"memory has no room for .* GB of weights; choose a smaller model"):
        load(EngineConfig(model=llama, backend="reference"))


def test_a_device_is_refused_what_it_declares_and_the_core_cannot_keep(program):
    placement = placed(program)
    plan, _ = make_plan(placement, Packing(placement).weights, "f32", (8,), make_limits(16, 2, 64, 16, 4))
    largest = max(prod(s.shape) * HOST_DTYPES[s.dtype].itemsize for s in plan.states)
    check_device(plan, DeviceInfo("d", "b", largest_allocation=largest))
    with pytest.raises(ConfigError, match="allocates at most"):
        check_device(plan, DeviceInfo("d", "b", largest_allocation=largest - 1))
    with pytest.raises(ConfigError, match="no other device of this program takes steps of these sizes"):
        check_device(plan, DeviceInfo("d", "b", buckets=(16,)))
    check_device(replace(plan, buckets=(16,)), DeviceInfo("d", "b", buckets=(16,)))
    check_device(plan, DeviceInfo("d", "b", dtypes=frozenset({"f32", "i32"})))
    with pytest.raises(ConfigError, match=r"state history is kept in i32, .* holds f32; choose another --backend"):
        check_device(plan, DeviceInfo("d", "b", dtypes=frozenset({"f32"})))
    with pytest.raises(
        ConfigError, match=r"state kv.0.k is kept in f32, and the device d holds f16, i32; choose another"
    ):
        check_device(plan, DeviceInfo("d", "b", dtypes=frozenset({"f16", "i32"}), roles={"act": "f16"}))
    with pytest.raises(ConfigError, match="keeps the role act in bf16, which it does not hold"):
        check_device(plan, DeviceInfo("d", "b", dtypes=frozenset({"f32", "i32"}), roles={"act": "bf16"}))
