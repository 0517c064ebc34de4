"""The families against transformers, from both formats."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
import tiny_models
import torch
from checkpoints import FAMILIES, assert_logits, logits_of, model_of, save, saved_once
from session_logits import load_for_logits, logits

from engine import LLM, SamplingParams

# Prefill, decode and chunks that begin inside a block and on its border.
CHUNKS = ((1,), (15, 1, 1, 7), (16, 16, 1), (40, 1, 1, 9, 1))
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


saved = saved_once(model_of)


@pytest.fixture(scope="session")
def converted(tmp_path_factory, saved):
    """(family, dtype) -> its GGUF."""
    made = {}

    def get(family, dtype=np.float32):
        if (family, dtype) not in made:
            path = tmp_path_factory.mktemp("gguf") / "model.gguf"
            made[family, dtype] = tiny_models.to_gguf(saved(family), path, dtype)
        return made[family, dtype]

    return get


def generator(model):
    """Fresh prompts on every run, but not where a rounding can turn a near tie of two experts."""
    return np.random.default_rng(11 if model.config.model_type == "mixtral" else None)


def random_ids(rng, count):
    return rng.integers(3, tiny_models.VOCAB, count).tolist()


def assert_same_logits(path, backend, model, **settings):
    loaded = load_for_logits(path, backend, **settings)
    rng = generator(model)
    for chunks in CHUNKS:
        ids = random_ids(rng, sum(chunks))
        assert_logits(logits(loaded, ids, chunks), model, ids, f"{chunks}")


def assert_greedy(path, backend, model, **settings):
    """Each token is transformers' best after the tokens before it, or within 1e-3 of that."""
    rng = generator(model)
    prompts = [random_ids(rng, n) for n in (1, 3, 16, 33, 100)]
    with LLM(path, backend=backend, kv_cache_dtype="f32", threads=2, max_num_batched_tokens=64, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == 64
        steps = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1]
        behind = steps.max(axis=1) - steps[np.arange(64), tokens]
        assert (behind <= 1e-3).all(), f"{prompt}: at token {int(np.argmax(behind > 1e-3))}"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, saved, backend):
    assert_same_logits(saved(family), backend, model_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, saved, backend):
    assert_greedy(saved(family), backend, model_of(family))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama linear rope", "llama biases")])
def test_a_gguf_gives_the_same_logits(family, converted, backend):
    assert_same_logits(converted(family), backend, model_of(family))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
def test_a_gguf_in_f16(family, converted, backend):
    path = converted(family, np.float16)
    assert_same_logits(path, backend, checkpoints.in_half(model_of(family)))


def test_a_gguf_with_a_tensor_an_expert(tmp_path, saved, backend):
    path = tiny_models.to_gguf(saved("mixtral"), tmp_path / "model.gguf", split_experts=True)
    assert_same_logits(path, backend, model_of("mixtral"))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_sharded_checkpoints(family, tmp_path, backend):
    folder = save(family, tmp_path, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert_same_logits(folder, backend, model_of(family))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},  # as llama.cpp wrote it until October 2023
    ],
)
def test_linear_rope_scaling_in_gguf(keys, tmp_path, saved, backend):
    path = tiny_models.to_gguf(saved("llama linear rope"), tmp_path / "model.gguf", **keys)
    assert_same_logits(path, backend, model_of("llama linear rope"))


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_sizes(block_size, saved, backend):
    assert_same_logits(saved("qwen3"), backend, model_of("qwen3"), block_size=block_size)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bf16_weights_round_no_more_than_a_model_in_bf16(family, tmp_path):
    """The CPU rounds the inputs of bf16 matrices to bf16; transformers in bf16 rounds every value."""
    rounded = model_of(family)
    half = type(rounded)(rounded.config).eval()
    half.load_state_dict(rounded.state_dict())
    half.to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    whole = type(rounded)(rounded.config).eval()
    whole.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    ids = random_ids(np.random.default_rng(11), 60)
    want = logits_of(whole, ids)
    with torch.no_grad():
        theirs = half(torch.tensor([ids])).logits[0].float().numpy()
    got = logits(load_for_logits(tmp_path, "cpu"), ids, (40, 1, 1, 18))
    assert rms(got - want) <= rms(theirs - want) < 0.05 * rms(want)


def rms(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "int16", "int8"])
def test_smaller_kv_dtypes_stay_near(dtype, saved, backend):
    """The cache's rounding shows, and is no more than rounding."""
    loaded = load_for_logits(saved("llama"), backend, kv_cache_dtype=dtype)
    ids = random_ids(np.random.default_rng(), 50)
    want, got = logits_of(model_of("llama"), ids), logits(loaded, ids, (40, 1, 9))
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert 1e-6 < error < 0.05, error


def test_text_goes_in_and_out_alike_in_both_formats(saved, converted, backend):
    outputs = []
    for path in (saved("llama"), converted("llama")):
        with LLM(path, backend=backend, threads=2, kv_cache_dtype="f32") as llm:
            outputs.append(llm.generate("The quick café 🙂", SamplingParams(temperature=0.0, max_tokens=24))[0])
            assert llm.get_tokenizer().bos_id == 1
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[0].prompt_token_ids[0] == 1
    assert outputs[0].outputs == outputs[1].outputs
