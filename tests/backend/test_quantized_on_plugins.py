"""Quantized models on the backends of this tree's plugins, beside the CPU, which rounds activations in the same groups."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models

from engine.backend.registry import discover
from engine.formats import open_checkpoint
from engine.quantize.mix import quant_type
from engine.quantize.to_gguf import quantize_to_gguf
from engine.testing.models import answers, compare_answers, random_prompts


@pytest.fixture
def opencl():
    found = next((backend for backend in discover() if backend.name == "opencl"), None)
    if found is None or not found.probe.available:
        pytest.skip("the plugin of OpenCL is not installed" if found is None else found.probe.reason)
    return "opencl"


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1"])
def test_answers_are_near_to_the_cpu_s(kind, opencl, cpu, tmp_path):
    """They differ where an activation lies between two steps: by 0.04 at most in 16 models."""
    tiny_models.write_llama(tmp_path, np.random.default_rng())
    source, path = tiny_models.to_gguf(tmp_path, tmp_path / "plain.gguf"), tmp_path / f"{kind}.gguf"
    quantize_to_gguf(open_checkpoint(source), path, quant_type(kind))
    prompts = random_prompts(np.random.default_rng())
    agreement = compare_answers(answers(path, opencl, prompts), answers(path, cpu, prompts), 0.2)
    assert len(agreement.ties) < len(prompts)
