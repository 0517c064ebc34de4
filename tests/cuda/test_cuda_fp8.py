"""Numbers of E4M3 in the kernels, beside the references."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend.v1 import BoundCall, Call, Dims, Frame, Limits, Value
from engine.ops.dtypes import from_f32, to_f32
from engine.testing import models
from engine.testing.cases import CaseWeight
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

    sizes = (10.0 ** np.arange(-5, 5)).astype(np.float32).repeat(1000)
    values = np.random.default_rng().standard_normal(10000, np.float32) * sizes
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


def _product(device, x, raw, shape, asked, residual=None):
    """linear with a weight in the format FP8, and whether products of E4M3 could be taken."""
    [provider] = device.providers()["linear"]
    weight = CaseWeight("w", ("FP8", raw, shape))
    packed = provider.pack(weight, ("linear",), lambda _: None)
    np.testing.assert_array_equal(packed.unpack(), weight.dense())
    inputs, given = {"x": Value(0, "x", ("T", shape[1]), "f32")}, {0: device.copy_in(x)}
    if residual is not None:
        inputs["residual"], given[2] = Value(2, "residual", ("T", shape[0]), "f32"), device.copy_in(residual)
    call = Call(
        "linear",
        inputs,
        (Value(1, "y", ("T", shape[0]), "f32"),),
        {"weight": weight},
        attrs={"quantized_activation": asked},
    )
    dims = Dims(T=len(x))
    frame = Frame(dims, given, {})
    provider.bind(BoundCall(call, provider, {"weight": packed}), Limits(dims, 64, 1))(frame)
    return device.copy_out(frame.values[1]), packed.handle.multiplies_fp8, weight.dense()


@pytest.mark.parametrize(("columns", "taken"), [(384, True), (128, True), (32, False)])
def test_products_of_fp8(columns, taken, device):
    """With scales of a row, of blocks and of 32 columns, for which x stays as it is; a row that is not finite is alone so."""
    rng = np.random.default_rng()
    rows, outputs, depth = 5, 40, 384
    codes = from_f32(rng.standard_normal((outputs, depth // 32, 32), np.float32), "fp8")
    scale = rng.uniform(0.001, 2, (outputs, depth // columns, 1)).astype(np.float32).repeat(columns // 32, axis=1)
    raw = np.concatenate([scale.view(np.uint8), codes], axis=2).reshape(outputs, -1)
    # A power of whole numbers is a float64, whose quotients round to other bytes than the kernel's now and then.
    x = rng.standard_normal((rows, depth), np.float32) * (10.0 ** rng.integers(-6, 6, (rows, 1))).astype(np.float32)
    x[1] = 0
    x[3, rng.integers(depth)] = rng.choice(np.float32([np.nan, np.inf, -np.inf]))
    residual = rng.standard_normal((rows, outputs), np.float32)
    got, multiplies, weight = _product(device, x, raw, (outputs, depth), "fp8", residual=residual)
    assert multiplies == taken
    assert not np.isfinite(got[3]).any() if taken else True
    finite = [0, 1, 2, 4]
    step = np.abs(x[finite]).max(axis=1, keepdims=True) / np.float32(448)
    step = np.where(step > 0, step, np.float32(1))
    near = to_f32(from_f32(x[finite] / step, "fp8"), "fp8") * step if taken else x[finite]
    want = near.astype(np.float64) @ weight.T.astype(np.float64) + residual[finite]
    size = np.abs(near).astype(np.float64) @ np.abs(weight).T + np.abs(residual[finite])
    assert (np.abs(got[finite] - want) <= 1e-5 * size).all()

    plain, _, _ = _product(device, x, raw, (outputs, depth), "allowed")
    exact = x[finite].astype(np.float64) @ weight.T.astype(np.float64)
    assert (np.abs(plain[finite] - exact) <= 1e-5 * np.abs(x[finite]).astype(np.float64) @ np.abs(weight).T).all()
