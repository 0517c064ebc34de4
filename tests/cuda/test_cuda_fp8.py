"""Numbers of E4M3 in the kernels, beside the references."""

from __future__ import annotations

import numpy as np
import pytest

from engine.ops.dtypes import from_f32, to_f32
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint


@pytest.fixture
def kernels(device):
    import fp8_kernels

    return fp8_kernels


def test_rounding_is_the_reference_s(kernels, device):
    """Random bits, what lies around the numbers and half way between them, and what is larger than all."""
    import torch

    rng = np.random.default_rng()
    numbers = to_f32(np.arange(127, dtype=np.uint8), "fp8")
    between = np.concatenate([numbers[:-1] + np.diff(numbers) / 2, [464, 1e9, np.inf, np.nan, 2.0**-150]])
    near = np.concatenate([numbers, between]).astype(np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))])
    wild = rng.integers(0, 2**32, 4096, np.uint32).view(np.float32)
    values = np.resize(np.concatenate([near, -near, wild]), 8192).astype(np.float32)
    got = torch.empty(len(values), dtype=torch.uint8)
    kernels.narrow[(1,)](torch.from_numpy(values.copy()), got, BLOCK=len(values))
    np.testing.assert_array_equal(got.numpy(), from_f32(values, "fp8"))


@pytest.mark.parametrize("native", [False, True])
def test_every_byte_is_read_exactly(native, kernels, device):
    import torch

    codes = np.arange(256, dtype=np.uint8)
    got = torch.empty(256)
    kernels.widen[(1,)](torch.from_numpy(codes), got, NATIVE=native)
    known = codes & 0x7F != 0x7F if native else slice(None)  # the interpreter takes NaN for a number there
    np.testing.assert_array_equal(got.numpy()[known], to_f32(codes, "fp8")[known])
    torch_s = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    np.testing.assert_array_equal(torch_s, to_f32(codes, "fp8"))


def test_the_reference_rounds_as_torch_does(device):
    """But for what is too large, which torch makes NaN."""
    import torch

    values = np.random.default_rng().standard_normal(10000).astype(np.float32) * np.float32(10.0) ** np.arange(
        -5, 5
    ).repeat(1000)
    small = values[np.abs(values) < 448]
    want = torch.from_numpy(small).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(from_f32(small, "fp8"), want)
    assert from_f32(np.float32([449, -1e9, np.inf, -np.nan]), "fp8").tolist() == [0x7E, 0xFE, 0x7F, 0x7F]


@pytest.mark.parametrize("kind", ["llama", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_answers_with_a_cache_of_fp8(kind, device, tmp_path):
    rng = np.random.default_rng()
    folder, prompts = write_checkpoint(kind, tmp_path / kind, rng), models.random_prompts(rng, (3, 20))
    got, want = (models.answers(folder, name, prompts, new=4, kv_cache_dtype="fp8") for name in ("cuda", "reference"))
    models.compare_answers(got, want, 0.1)  # a value near the middle of two numbers may become either
