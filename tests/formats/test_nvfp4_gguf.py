"""NVFP4 in GGUF files: the weights are those of the gguf package times the scales beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
from gguf import GGMLQuantizationType, quants

from engine.errors import FormatError
from engine.formats import Checkpoint, open_checkpoint

Array = np.ndarray[Any, Any]
SHAPE = {"blk.0.attn_q": (6, 128), "blk.0.ffn_down_exps": (3, 5, 64)}


def blocks(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Any bytes, of which those of scales may have a sign or say NaN."""
    return rng.integers(0, 256, (*shape[:-1], shape[-1] // 64 * 36), np.uint8)


def written(folder: Path, raw: dict[str, Array], beside: dict[str, Array], architecture: str = "llama") -> Checkpoint:
    writer = gguf.GGUFWriter(folder / "m.gguf", architecture)
    for name, rows in raw.items():
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=GGMLQuantizationType.NVFP4)
    for name, values in beside.items():
        writer.add_tensor(name, values)
    tiny_models.finish(writer)
    return open_checkpoint(folder / "m.gguf")


@pytest.mark.parametrize("scaled", [True, False])
def test_weights_have_the_scale_beside_them(tmp_path, scaled):
    rng = np.random.default_rng()
    raw = {name: blocks(rng, shape) for name, shape in SHAPE.items()}
    scales = {"blk.0.attn_q": rng.lognormal(0, 3, 1), "blk.0.ffn_down_exps": rng.lognormal(0, 3, 3)}
    scales = {name: values.astype(np.float32) for name, values in scales.items()}
    beside = {f"{name}.scale": values for name, values in scales.items()} if scaled else {}
    inputs = {f"{name}.input_scale": np.ones(1, np.float32) for name in raw}
    tensors = written(tmp_path, raw, beside | inputs).tensors
    assert set(tensors) == {f"{name}.weight" for name in raw}
    for name, shape in SHAPE.items():
        found = tensors[f"{name}.weight"]
        assert (found.shape, found.format.name) == (shape, "NVFP4S")
        plain = quants.dequantize(raw[name], GGMLQuantizationType.NVFP4).reshape(-1, *shape[-2:])
        want = plain * (scales[name].reshape(-1, 1, 1) if scaled else 1)
        np.testing.assert_allclose(found.dense(), want.reshape(shape), rtol=3e-7, atol=0)
        rows = found.rows(2, 5)
        np.testing.assert_array_equal(found.format.decode(rows), found.dense().reshape(-1, shape[-1])[2:5])


def test_experts_may_have_one_scale_in_all(tmp_path):
    rng = np.random.default_rng()
    [name] = {"blk.0.ffn_down_exps"}
    raw = blocks(rng, SHAPE[name])
    found = written(tmp_path, {name: raw}, {f"{name}.scale": np.array([0.25], np.float32)}).tensors[f"{name}.weight"]
    want = quants.dequantize(raw, GGMLQuantizationType.NVFP4) / 4
    np.testing.assert_array_equal(found.dense(), want.reshape(SHAPE[name]))


def test_a_factor_of_the_architecture_is_no_scale(tmp_path):
    """Gemma 4 multiplies what an expert gives by a factor of that name."""
    rng = np.random.default_rng()
    raw = {name: blocks(rng, shape) for name, shape in SHAPE.items()}
    factors = {"blk.0.attn_q.scale": np.ones(1, np.float32), "blk.0.ffn_down_exps.scale": np.full(3, 2, np.float32)}
    tensors = written(tmp_path, raw, factors, "gemma4").tensors
    assert set(tensors) == {*(f"{name}.weight" for name in raw), "blk.0.ffn_down_exps.scale"}
    want = quants.dequantize(raw["blk.0.ffn_down_exps"], GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(tensors["blk.0.ffn_down_exps.weight"].dense(), want.reshape(3, 5, 64))


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (np.full(1, np.nan, np.float32), "numbers from 0 to 2"),
        (np.full(1, -1, np.float32), "numbers from 0 to 2"),
        (np.full(1, 1e30, np.float32), "numbers from 0 to 2"),
        (np.ones(6, np.float32), r"attn_q.scale is F32 \[6\]; the scale of blk.0.attn_q.weight must be F32 \[1\]"),
        (np.ones(1, np.float16), "is F16"),
    ],
)
def test_a_broken_scale_is_refused_in_a_sentence(tmp_path, scale, reason):
    raw = {"blk.0.attn_q": blocks(np.random.default_rng(), SHAPE["blk.0.attn_q"])}
    with pytest.raises(FormatError, match=reason) as refused:
        written(tmp_path, raw, {"blk.0.attn_q.scale": scale})
    assert "\n" not in str(refused.value)
