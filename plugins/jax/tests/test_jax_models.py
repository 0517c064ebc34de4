"""Whole models in what the kit does not look at: other storage, swapped sequences, options."""

from __future__ import annotations

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.backend.registry import open_device
from engine.testing.checkpoints import write_checkpoint
from engine.testing.models import answers, compare_answers, random_prompts, tolerance_of
from engine_jax.options import options_of


@pytest.mark.slow
def test_activations_in_bf16(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_JAX_DTYPE", "bf16")
    rng = np.random.default_rng()
    model, prompts = write_checkpoint("qwen3", tmp_path / "qwen3", rng), random_prompts(rng, (1, 20))
    tolerance = tolerance_of(open_device("jax", {}).describe())
    assert tolerance > 0.05
    compare_answers(answers(model, "jax", prompts), answers(model, "reference", prompts), tolerance)


def test_swapped_sequences_go_on_as_they_were(tmp_path):
    rng = np.random.default_rng()
    model, prompts = write_checkpoint("llama", tmp_path / "llama", rng), random_prompts(rng, (30, 25, 40, 12))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    settings = {"max_model_len": 96, "max_num_seqs": 4, "warm_up": False, "max_num_batched_tokens": 64}

    def tokens(**more):
        with LLM(model, backend="jax", **settings, **more) as llm:
            found = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
            return found, llm.engine._core.scheduler.stats().preemptions

    want, none = tokens()
    got, preemptions = tokens(kv_cache_tokens=128, preemption="swap")
    assert not none and preemptions and got == want


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("buckets", "", "sizes of at least 1"),
        ("buckets", "0,8", "sizes of at least 1"),
        ("dtype", "f16", "f32 or bf16"),
        ("pallas", "maybe", "0 or 1"),
        ("devices", 0, "at least 1"),
    ],
)
def test_options_that_will_not_do(name, value, said):
    with pytest.raises(ValueError, match=said):
        options_of({name: value})


def test_options_come_from_the_environment_where_they_are_not_given(monkeypatch):
    monkeypatch.setenv("ENGINE_JAX_BUCKETS", "64,8")
    monkeypatch.setenv("ENGINE_JAX_PALLAS", "1")
    assert options_of({"threads": 2}).buckets == (8, 64) and options_of({}).pallas
    assert options_of({"buckets": [4], "pallas": False}).buckets == (4,)
