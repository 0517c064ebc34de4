"""Several devices of one process: a model shared out by this backend, and by the core's ranks through collectives."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from engine import LLM
from engine.testing.checkpoints import write_checkpoint
from engine.testing.collectives import CHECKS, Subject
from engine.testing.models import answers, compare_answers, random_prompts
from engine_jax.device import JaxDevice
from engine_jax.options import options_of

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(autouse=True)
def two_sizes(monkeypatch):
    monkeypatch.setenv("ENGINE_JAX_BUCKETS", "8,64")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "mixtral", "deepseek"])
def test_two_devices_give_what_one_gives(kind, tmp_path, monkeypatch):
    rng = np.random.default_rng()
    model, prompts = write_checkpoint(kind, tmp_path / kind, rng), random_prompts(rng, (1, 9, 40))
    want = answers(model, "jax", prompts, 6, **SMALL)
    monkeypatch.setenv("ENGINE_JAX_DEVICES", "2")
    compare_answers(answers(model, "jax", prompts, 6, **SMALL), want, 1e-4)


def test_weights_and_caches_lie_in_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_JAX_DEVICES", "2")
    model = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    with LLM(model, backend="jax", max_model_len=64, warm_up=False, **SMALL) as llm:
        llm.generate([[1, 2, 3]])
        loaded = llm.loaded
        by_name = {key[2]: packed.handle.weight.codes for key, packed in loaded.packing.weights.items()}
        shared = {name: parts_of(array) for name, array in by_name.items() if array.ndim > 1}
        assert {parts for name, parts in shared.items() if "attn_q" in name or name == "output.weight"} == {(2, 1)}
        assert {parts for name, parts in shared.items() if "attn_output" in name or "ffn_down" in name} == {(1, 2)}
        device = loaded.device
        assert parts_of(device.alloc((5, 16, 2, 8), "f16")) == (1, 1, 2, 1)
        assert parts_of(device.alloc((5, 16, 3, 8), "f16")) == (1, 1, 1, 1)


def parts_of(array: jax.Array) -> tuple[int, ...]:
    """Into how many parts each axis falls."""
    part = array.addressable_shards[0].data.shape
    return tuple(whole // own for whole, own in zip(array.shape, part, strict=True))


@pytest.mark.parametrize("name", CHECKS)
def test_collectives(name):
    check, ranks = CHECKS[name]
    Subject("", "jax", {}, "threads").check(check, ranks, int(np.random.default_rng().integers(2**32)))


@pytest.mark.slow
def test_ranks_of_the_core_give_what_one_gives(tmp_path):
    rng = np.random.default_rng()
    model, prompts = write_checkpoint("llama", tmp_path / "llama", rng), random_prompts(rng, (1, 9, 40))
    want = answers(model, "jax", prompts, 6, **SMALL)
    compare_answers(answers(model, "jax", prompts, 6, tensor_parallel_size=2, **SMALL), want, 1e-4)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match=r"JAX has 4 devices here, and those from number 3 to 4 are asked for"):
        JaxDevice(3, options_of({"devices": 2}))
    shared = JaxDevice(0, options_of({"devices": 2}))
    with pytest.raises(ValueError, match="not by both"):
        shared.collectives(None)
