"""What a cache is held in where nobody says: what all devices of a model are at their best with."""

import json

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.errors import ConfigError
from engine.runtime.config import EngineConfig
from engine.runtime.load import load
from engine.testing.checkpoints import write_checkpoint
from engine_cpu.device import CpuDevice

FASTER_IN_PAIRS = {"amx", "avx512", "avx512_vnni", "avx_vnni"}


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())


def dtype_of(folder, **settings) -> str:
    loaded = load(EngineConfig(model=folder, max_model_len=64, **settings))
    assert loaded.program.kv_dtype == loaded.config.kv_cache_dtype
    return loaded.config.kv_cache_dtype


@pytest.mark.parametrize("isa", CpuDevice(threads=1).describe().details["variants"].split())
def test_a_processor_takes_whole_numbers_where_it_multiplies_them_faster(isa, folder, monkeypatch):
    monkeypatch.setenv("ENGINE_CPU_ISA", isa)
    assert dtype_of(folder, backend="cpu") == ("int16" if isa in FASTER_IN_PAIRS else "f16")


def test_other_devices_take_f16(folder):
    assert dtype_of(folder, backend="reference") == "f16"


def test_devices_that_differ_take_f16(folder):
    assert dtype_of(folder, place="layer 0: reference; rest: cpu") == "f16"


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int16", "int8"])
def test_what_is_named_is_taken(dtype, folder):
    assert dtype_of(folder, backend="cpu", kv_cache_dtype=dtype) == dtype


def test_heads_of_an_odd_size_take_f16(tmp_path):
    """Whole numbers are multiplied in pairs; nothing is left to the reference for it."""
    folder = write_checkpoint("gpt2", tmp_path / "odd", np.random.default_rng())
    config = json.loads((folder / "config.json").read_text())
    heads = config["n_embd"]  # of one value each
    (folder / "config.json").write_text(
        json.dumps(
            config | {"n_head": heads, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 1}
        )
    )
    loaded = load(EngineConfig(model=folder, backend="cpu", max_model_len=32))
    assert {layer.head_dim % 2 for layer in loaded.program.kv_layers} == {1}
    assert loaded.config.kv_cache_dtype == "f16" and not loaded.placement.fallbacks()


def test_a_dtype_that_there_is_not_is_refused(folder):
    with pytest.raises(ConfigError, match=r"no KV dtype 'int4'; choose one of f32, .* int8, fp8, or auto\."):
        EngineConfig(model=folder, kv_cache_dtype="int4")


def test_whole_numbers_of_16_bits_are_as_near_as_f16(folder):
    """Log-probabilities of what an f32 cache chooses, over a context of more than a chunk."""
    rng = np.random.default_rng()
    prompts = [rng.integers(3, 200, n).tolist() for n in (60, 33, 5)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    found = {}
    for dtype in ("f32", "f16", "int16"):
        with LLM(folder, backend="cpu", threads=2, max_model_len=96, kv_cache_dtype=dtype) as llm:
            outputs = llm.generate(prompts, params)
        found[dtype] = np.array(
            [next(iter(one.values())) for output in outputs for one in output.prompt_logprobs if one]
        )
    errors = {dtype: np.sqrt(np.mean((found[dtype] - found["f32"]) ** 2)) for dtype in ("f16", "int16")}
    assert 0 < errors["int16"] < 2 * errors["f16"]
