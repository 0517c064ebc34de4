"""After the warm-up nothing is compiled, whatever comes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.testing.checkpoints import write_checkpoint
from engine.testing.models import random_prompts

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled():
    """Names of what was compiled so far, as JAX tells it."""
    events: list[str] = []

    def listen(event, duration, **about):
        if event == COMPILED:
            events.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def random_params(rng) -> SamplingParams:
    kinds = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01})
    some = kinds[rng.integers(len(kinds))] | {"logprobs": int(rng.integers(0, 5))}
    if rng.random() < 0.5:
        some |= {"logit_bias": {int(i): float(rng.uniform(-5, 5)) for i in rng.permutation(64)[: rng.integers(1, 30)]}}
    if rng.random() < 0.5:
        some |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "no_repeat_ngram_size": 2}
    if rng.random() < 0.3:
        some |= {"prompt_logprobs": 1}
    if rng.random() < 0.3:
        some |= {"n": 3}
    return SamplingParams(max_tokens=int(rng.integers(1, 12)), ignore_eos=True, **some)


@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_random_batches_compile_nothing(kind, compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_JAX_BUCKETS", "4,32")
    rng = np.random.default_rng()
    model = write_checkpoint(kind, tmp_path / kind, rng)
    settings = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_tokens": 512}
    with LLM(model, backend="jax", preemption="swap", swap_space=0.01, **settings) as llm:
        assert compiled, "JAX tells of no compilation, so this test sees nothing."
        compiled.clear()
        for _ in range(6):
            prompts = random_prompts(rng, rng.integers(1, 60, 5).tolist())
            llm.generate(prompts, [random_params(rng) for _ in prompts])
        assert not compiled
