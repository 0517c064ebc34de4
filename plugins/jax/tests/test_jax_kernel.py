"""The Pallas kernel, run by Python, beside the reference of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.ops import OPS
from engine.testing.checkpoints import write_checkpoint
from engine.testing.compare import Bound, close
from engine.testing.models import answers, compare_answers, random_prompts
from engine.testing.running import Bench
from engine_jax.cache import PAGED
from engine_jax.device import JaxDevice
from engine_jax.given import Given
from engine_jax.kernel import paged_attention
from engine_jax.options import options_of
from engine_jax.shape import Shape

SPEC = OPS["attention"]
MOST = 1500
"""Blocks looked at: each takes Python a millisecond."""
CASES = [
    number
    for number, case in enumerate(SPEC.cases(np.random.default_rng(0)))
    if case.kv.dtype in PAGED.dtypes
    and case.attrs.get("causal", True)
    and case.dims.T * case.dims.P * case.attrs["kv_heads"] <= MOST
]


@pytest.mark.parametrize("number", CASES)
def test_agrees_with_the_reference(number):
    case = list(SPEC.cases(np.random.default_rng()))[number]
    device = JaxDevice(0, options_of({"platform": "cpu"}))
    bench = Bench(device, SPEC, case)
    provider = device.providers()["attention"][0]
    bench.bind(provider)
    weights = {name: packed.handle.weight for name, packed in bench.packed[provider.packer].items()}
    states = {name: device.copy_in(array) for name, array in bench.states(case).items()}
    given = Given({name: jnp.asarray(array) for name, array in case.inputs.items()}, weights, states)
    shape = Shape.of(bench.call)
    found = jax.jit(lambda given_states, inputs: paged_attention(Given(inputs, weights, given_states), shape, True))
    [want] = bench.reference(case)[0]
    bound = Bound(SPEC.tolerance.absolute, SPEC.tolerance.relative)
    close(case.name, bound, np.asarray(found(given.states, given.inputs)), want)


@pytest.mark.slow
def test_a_model_decodes_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_JAX_PALLAS", "1")
    monkeypatch.setenv("ENGINE_JAX_BUCKETS", "4,64")
    rng = np.random.default_rng()
    model = write_checkpoint("gpt_oss", tmp_path / "gpt_oss", rng)
    prompts = random_prompts(rng, (1, 9, 30))
    got, want = (
        answers(model, backend, prompts, 4, kv_cache_dtype="int8", max_num_seqs=4, max_num_batched_tokens=64)
        for backend in ("jax", "reference")
    )
    compare_answers(got, want, 0.1)
