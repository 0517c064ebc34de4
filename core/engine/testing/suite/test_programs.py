"""Whole programs: tiny models of each kind, beside the reference, and alone as in a batch."""

import pytest

from engine.testing import models
from engine.testing.checkpoints import KINDS, write_checkpoint


@pytest.fixture(params=KINDS)
def model(request, tmp_path, rng):
    return write_checkpoint(request.param, tmp_path / request.param, rng)


def test_answers_are_the_reference_s(model, backend, device, rng, record_property):
    prompts = models.random_prompts(rng)
    got, want = (models.answers(model, name, prompts) for name in (backend, "reference"))
    agreement = models.compare_answers(got, want, models.tolerance_of(device.describe()))
    record_property("worst", agreement.worst)
    record_property("near ties", [f"{tie.margin:.3g}" for tie in agreement.ties])


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "int16", "int8", "fp8"])
def test_answers_with_a_smaller_cache(kv_dtype, tmp_path, backend, device, rng):
    known = [layout for layout in device.describe().kv_layouts if kv_dtype in layout.dtypes]
    if not known:
        pytest.skip(f"no KV layout of this device holds {kv_dtype}")
    model, prompts = write_checkpoint("llama", tmp_path / "llama", rng), models.random_prompts(rng)
    got, want = (models.answers(model, name, prompts, kv_cache_dtype=kv_dtype) for name in (backend, "reference"))
    models.compare_answers(got, want, 0.1 if kv_dtype in ("int8", "fp8") else 2e-2)


def test_alone_as_in_a_batch(model, backend, rng):
    if not models.claims_invariance(model, backend):
        pytest.skip("not every provider claims that rows are independent of the batch")
    models.check_batching(model, backend, models.random_prompts(rng))


def test_embeddings_are_the_reference_s(tmp_path, backend, device, rng):
    model = write_checkpoint("qwen3", tmp_path / "qwen3", rng)
    models.check_embeddings(model, backend, models.random_prompts(rng), models.tolerance_of(device.describe()))
