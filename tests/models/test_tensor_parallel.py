"""Every family on several ranks, which are threads here, gives the logits of one."""

from __future__ import annotations

import threading
import uuid
from functools import cache
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import test_more_families
import tiny_models
from session_logits import load_for_logits, logits
from test_quantized_checkpoints import quantized, random_model
from test_same_tokens import MODELS

from engine.backend.v1 import Group
from engine.errors import ConfigError
from engine.formats import open_checkpoint
from engine.models import load_model
from engine.quantize.mix import quant_type
from engine.quantize.to_gguf import quantize_to_gguf
from engine.runtime.config import EngineConfig
from engine.runtime.load import Loaded, load

CHUNKS = (17, 1, 1, 11)
TOLERANCE = 1e-4
# What else differs in how it is split: KV heads that several ranks hold, tied heads, biases after the reduction.
MORE = {
    **{name: checkpoints for name in ("llama four heads a KV head, wide", "llama biases", "qwen2 tied", "qwen3 tied")},
    **{
        name: test_more_families
        for name in ("cohere norms of heads", "falcon 40b", "opt norms after, projected", "phi")
    },
    **{name: test_more_families for name in ("gemma4 keys are values", "gemma4 experts")},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    def save(model) -> Path:
        model_of, name = MODELS[model] if model in MODELS else (MORE[model].model_of, model)
        return checkpoints.save_model(model_of(name), tmp_path_factory.mktemp("model"))

    return cache(save)


@pytest.fixture
def threads(install):
    install("engine.collectives", "threads", "thread_group:threads")


def on_ranks(ranks: int, run) -> list:
    """``run(group)`` on each rank at a time, in threads."""
    addresses = tuple(f"{uuid.uuid4()}:{rank}" for rank in range(ranks))
    found: list = [None] * ranks

    def one(rank: int) -> None:
        try:
            found[rank] = run(Group(rank, addresses, 60.0))
        except Exception as error:
            found[rank] = error

    workers = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def load_rank(path: Path, backend: str, group: Group, **settings) -> Loaded:
    settings = {"kv_cache_dtype": "f32", "threads": 1, "max_num_seqs": 64, "collectives": "threads"} | settings
    config = EngineConfig(
        model=path, backend=backend, keep=("logits",), tensor_parallel_size=group.size, max_model_len=96, **settings
    )
    return load(config, None, group)


def assert_same(path: Path, backend: str, ranks: int, error: float = 0.0, **settings) -> list[Loaded]:
    """``error``: what rounded activations make of the logits, relative, if any are."""
    # Fresh prompts on every run, but not where a rounding can turn a near tie of two experts.
    experts = load_model(open_checkpoint(path)).config.experts
    ids = np.random.default_rng(11 if experts else None).integers(3, tiny_models.VOCAB, sum(CHUNKS)).tolist()
    want = logits(load_for_logits(path, backend, threads=1, max_model_len=96, **settings), ids, CHUNKS)
    loaded = on_ranks(ranks, lambda group: load_rank(path, backend, group, **settings))
    found = on_ranks(ranks, lambda group: logits(loaded[group.rank], ids, CHUNKS))
    assert np.abs(want).max() > 1, "these logits are too small for the tolerance to mean anything"
    if error:
        assert rms(found[0] - want) < error * rms(want), ids
    else:
        np.testing.assert_allclose(found[0], want, rtol=0, atol=TOLERANCE, err_msg=str(ids))
    for other in found[1:]:
        assert other.tobytes() == found[0].tobytes(), "ranks differ, and would choose different tokens"
    return loaded


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("model", [*MODELS, *MORE])
def test_two_ranks(model, saved, backend, threads):
    assert_same(saved(model), backend, 2)


@pytest.mark.parametrize("model", ["Llama", "Gemma2", "Falcon", "GptOss", "DeepseekV3", "GPT2"])
def test_four_ranks(model, saved, cpu, threads):
    """More of them than most of these have KV heads."""
    assert_same(saved(model), cpu, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8", "error": 0.05},
        {"kv_allocator": "contiguous"},
        {"kv_allocator": "virtual"},
        {"fused": False},
        {"round_trip": True},
    ],
    ids=lambda settings: " ".join(map(str, next(iter(settings.items())))),
)
def test_two_ranks_with_other_settings(settings, saved, cpu, threads):
    assert_same(saved("Qwen3"), cpu, 2, **settings)


def test_chunks_change_no_bit(saved, cpu, threads):
    """Sums over ranks are taken in one order, wherever an element lies."""
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, sum(CHUNKS)).tolist()
    loaded = on_ranks(3, lambda group: load_rank(saved("GPT2"), cpu, group))
    chunked, whole = (
        on_ranks(3, lambda group, chunks=chunks: logits(loaded[group.rank], ids, chunks))
        for chunks in (CHUNKS, (sum(CHUNKS),))
    )
    assert chunked[0].tobytes() == whole[0].tobytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("model", ["Llama", "Mixtral", "Phi3", "Qwen2"])
def test_quantized_weights_are_split_where_their_blocks_end(model, kind, saved, backend, threads, tmp_path):
    """The feed-forward width of 96 is three blocks, so that ranks have 32 and 64 of it. Activations are rounded by the CPU."""
    path = tmp_path / "model.gguf"
    quantize_to_gguf(open_checkpoint(saved(model)), path, quant_type(kind))
    assert_same(path, backend, 2, error=0.05 if backend == "cpu" else 0.0)


def test_a_block_is_never_cut(tmp_path, threads):
    narrow = tiny_models.CONFIG | {"intermediate_size": 32}
    rng = np.random.default_rng()
    tiny_models.write_llama(tmp_path, rng, tiny_models.llama_tensors(rng, narrow), intermediate_size=32)
    path = tmp_path / "model.gguf"
    quantize_to_gguf(open_checkpoint(tmp_path), path, quant_type("Q8_0"))
    sentence = r"The feed-forward width 32 of layers\.0 cannot be shared by 2 ranks: .* multiples of 32"
    with pytest.raises(ConfigError, match=sentence):
        on_ranks(2, lambda group: load_rank(path, "reference", group))
    for file, ranks in ((path, 4), (tmp_path, 3)):
        sentence = rf"4 attention heads and 2 KV heads of layers\.0 cannot be shared by {ranks} ranks"
        with pytest.raises(ConfigError, match=sentence):
            on_ranks(ranks, lambda group, file=file: load_rank(file, "reference", group))


@pytest.mark.parametrize("method", ["gptq act-order", "w8a8", "fp8 blocks"])
def test_quantized_checkpoints(method, tmp_path, threads):
    """Where columns lie in an order of their own (act-order), the matrix stays whole, and its input is gathered."""
    rng = np.random.default_rng()
    quantized(random_model("llama", rng), tmp_path, rng, method)
    loaded = assert_same(tmp_path, "reference", 2, error=0.06 if method == "w8a8" else 0.0)
    gathered = [placed for placed in loaded[0].placement.calls if placed.call.op == "all_gather"]
    layers = loaded[0].model.config.layers
    assert len(gathered) == (1 + 2 * layers if method == "gptq act-order" else 1)
