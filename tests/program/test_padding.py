"""Steps padded to a device's sizes: tokens are those of exact steps, and nothing of the padding is ever seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.backend.v1 import Dims
from engine.errors import ConfigError
from engine.program.padding import Padding, common_buckets
from engine.testing.checkpoints import KINDS, write_checkpoint
from engine.testing.models import check_embeddings, random_prompts

FIXED = """
from dataclasses import replace
from engine.backend.v1 import Manifest, Probe
from engine_reference import ReferenceDevice
shapes = []
class FixedDevice(ReferenceDevice):
    def describe(self):
        return replace(super().describe(), backend="fixed", buckets={buckets}, invariant_buckets={invariant},
                       decode_buckets={decodes})
    def copy_in(self, array):
        shapes.append(array.shape)
        return array
manifest = Manifest("fixed", "1.1", lambda: Probe(True, "fixed sizes", -1), lambda index, options: FixedDevice())
"""


@pytest.fixture
def fixed(install):
    def make(*buckets: int, invariant: tuple[int, ...] | None = None, decodes: tuple[int, ...] = ()) -> str:
        source = FIXED.format(buckets=buckets, invariant=invariant, decodes=decodes)
        install("engine.backends", "fixed", "fixed_sizes:manifest", source)
        return "fixed"

    return make


def random_params(rng) -> SamplingParams:
    """Every input of a step that has a size of its own: biases, penalties, log-probabilities."""
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "seed": 6})
    some = kinds[rng.integers(len(kinds))] | {"logprobs": int(rng.integers(0, 4))}
    if rng.random() < 0.4:
        some |= {"logit_bias": {int(i): float(rng.uniform(-5, 5)) for i in rng.permutation(64)[: rng.integers(1, 20)]}}
    if rng.random() < 0.4:
        some |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "no_repeat_ngram_size": 2}
    if rng.random() < 0.3:
        some |= {"prompt_logprobs": 1}
    if rng.random() < 0.3:
        some |= {"n": 3}
    return SamplingParams(max_tokens=int(rng.integers(1, 9)), ignore_eos=True, **some)


def generated(model, backend, prompts, params, **settings):
    defaults = {"kv_cache_dtype": "f32", "max_model_len": 96, "max_num_seqs": 6, "warm_up": False}
    with LLM(model, backend=backend, **(defaults | settings)) as llm:
        first = llm.generate(prompts, params)
        return [*first, *llm.generate(prompts, params)]  # the second time prefixes are hit


def found(outputs):
    return [([(o.token_ids, o.logprobs) for o in out.outputs], out.prompt_logprobs) for out in outputs]


@pytest.mark.parametrize("sizes", [(7, 8, 33, 64), ()], ids=["all", "decodes"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_exact_steps(kind, sizes, fixed, tmp_path):
    rng = np.random.default_rng()
    model = write_checkpoint(kind, tmp_path / kind, rng)
    prompts = random_prompts(rng, rng.integers(1, 60, 7).tolist())
    params = [random_params(rng) for _ in prompts]
    settings = {"max_num_batched_tokens": int(rng.integers(8, 64)), "block_size": int(rng.choice([1, 4, 16]))}
    want = found(generated(model, "reference", prompts, params, **settings))
    backend = fixed(*sizes, decodes=() if sizes else (2, 5, 6))
    assert found(generated(model, backend, prompts, params, **settings)) == want


def test_embeddings_are_those_of_exact_steps(fixed, tmp_path):
    rng = np.random.default_rng()
    model = write_checkpoint("llama", tmp_path / "llama", rng)
    check_embeddings(model, fixed(decodes=(2, 5)), random_prompts(rng, (1, 1, 17)), 0.0)


def test_steps_have_few_sizes_and_all_of_them_are_warmed_up(fixed, tmp_path):
    rng = np.random.default_rng()
    model = write_checkpoint("llama", tmp_path / "llama", rng)
    with LLM(model, backend=fixed(4, 16, 64), max_model_len=96, max_num_seqs=6, max_num_batched_tokens=40) as llm:
        import fixed_sizes

        warmed = set(fixed_sizes.shapes)
        for _ in range(3):
            prompts = random_prompts(rng, rng.integers(1, 60, 7).tolist())
            llm.generate(prompts, [random_params(rng) for _ in prompts])
        assert set(fixed_sizes.shapes) <= warmed


def test_sizes_of_any_step(fixed, tmp_path):
    """A padded step has room for what it pads, in null blocks of sequences of its own."""
    rng = np.random.default_rng()
    model = write_checkpoint("llama", tmp_path / "llama", rng)
    with LLM(model, backend=fixed(8, 64, 512), max_model_len=96, max_num_seqs=6, warm_up=False) as llm:
        padding, limits = Padding(llm.loaded.plan), llm.loaded.plan.limits
        sizes = set()
        for _ in range(300):
            tokens = int(rng.integers(1, limits.dims.T + 1))
            counts = {name: int(rng.integers(0, 3000)) for name in "CHFB"}
            rows = int(rng.integers(0, min(tokens, limits.dims.R) + 1))
            dims = Dims(T=tokens, S=int(rng.integers(1, min(tokens, 6) + 1)), R=rows, P=1, M=min(rows, 1), **counts)
            padded = padding.sizes(dims)
            assert all(getattr(padded, name) >= getattr(dims, name) for name in vars(dims))
            assert (padded.S - dims.S) * min(96, padded.P * 16) >= padded.T - dims.T
            sizes.add((padded.T, padded.S, padded.P, padded.R))
        assert len(sizes) <= 3


@pytest.mark.parametrize("buckets", [(), (8, 64, 512)])
def test_decode_steps_alone_have_sizes(buckets, fixed, tmp_path):
    """In which every sequence has one token; T equals S in no other padded step."""
    rng = np.random.default_rng()
    model = write_checkpoint("llama", tmp_path / "llama", rng)
    backend = fixed(*buckets, decodes=(2, 4, 32))
    with LLM(model, backend=backend, max_model_len=96, max_num_seqs=7, warm_up=False) as llm:
        padding = Padding(llm.loaded.plan)
        steps = [inputs.dims for inputs in padding.empty_steps()]
        assert [dims.T for dims in steps[:3]] == [32, 4, 2] and (len(steps) == 3) != bool(buckets)
        assert [dims.T for dims in steps if dims.T == dims.S] == [32, 4, 2]
        for _ in range(100):
            sequences = int(rng.integers(1, 8))
            dims = Dims(T=sequences, S=sequences, R=sequences, P=int(rng.integers(1, 7)))
            padded = padding.sizes(dims)
            assert padded.T == padded.S == padded.R == next(size for size in (2, 4, 32) if size >= sequences)
            assert padded.P == 6
            for other in (replace(dims, T=sequences + 1), replace(dims, C=1), replace(dims, H=1), replace(dims, F=1)):
                padded = padding.sizes(other)
                assert padded.T != padded.S if buckets else padded == other


def test_sizes_that_several_devices_have():
    assert common_buckets([(), ()]) == ()
    assert common_buckets([(64, 8), ()]) == (8, 64)
    assert common_buckets([(8, 16, 64), (), (16, 64, 256)]) == (16, 64)


def test_a_device_whose_steps_are_too_small_is_refused(fixed, tmp_path):
    model = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    backend = fixed(8, 32)
    with pytest.raises(ConfigError, match=r"steps of 8, 32 tokens.*set --max-batch-tokens to at most 32"):
        LLM(model, backend=backend, max_num_batched_tokens=33)
    with LLM(model, backend=backend, max_num_batched_tokens=32, warm_up=False) as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))


def test_only_buckets_without_variance_are_used_where_tokens_must_not_vary(fixed, llama):
    backend = fixed(8, 16, 64, invariant=(64,))
    for deterministic, wanted in ((False, (8, 16, 64)), (True, (64,))):
        with LLM(
            llama, backend=backend, max_model_len=64, max_num_batched_tokens=60, deterministic=deterministic
        ) as llm:
            assert llm.loaded.plan.buckets == wanted
