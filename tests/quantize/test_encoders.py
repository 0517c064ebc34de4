"""Encoders of ggml's block formats, judged through the gguf package's decoders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist

import numpy as np
import pytest

from engine.errors import FormatError
from engine.formats import FORMATS, hfblocks
from engine.quantize import int8, nf4
from engine.quantize.encode import encode_rows

# Mean squared error of llama-quantize's encoders (ggml 0.25.3) on 2^20 standard normal weights, without and with an importance of
# exp(1.5 z) a column; with one, errors are weighted by it (benchmarks/quantize_peers.py).
PEER = {
    "Q4_0": (0.00737975, 0.00516411),
    "Q4_1": (0.00612451, 0.00311919),
    "Q5_0": (0.00182047, 0.00127163),
    "Q5_1": (0.00143207, 0.000733139),
    "Q8_0": (2.86303e-05, 2.86212e-05),
    "IQ4_NL": (0.00579906, 0.00408615),
    "MXFP4": (0.0131983, 0.0130875),
    "Q2_K": (0.0876469, 0.0406027),
    "Q3_K": (0.022739, 0.0148137),
    "Q4_K": (0.00509579, 0.00325099),
    "Q5_K": (0.00130484, 0.000878567),
    "Q6_K": (0.000314433, 0.000216568),
    "IQ4_XS": (0.00588771, 0.00419824),
}
# The largest error of a weight, as a share of the largest weight of its block.
WORST = {"Q2_K": 0.6, "Q3_K": 0.35, "MXFP4": 0.3, "Q6_K": 0.04, "Q5_K": 0.1, "Q8_0": 0.01}
EXACT_LEVELS = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q4_1": (0, 15), "Q5_1": (0, 31), "Q8_0": (-127, 127)}


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as made:
        yield made


def importance_of(rng, cols):
    """exp(1.5 z) of a mean of 1, z evenly drawn from a normal distribution, in any order."""
    normal = NormalDist()
    drawn = np.exp([1.5 * normal.inv_cdf((i + 0.5) / cols) for i in range(cols)])
    return rng.permutation(drawn / drawn.mean()).astype(np.float32)


def error(name, rows, weight, pool, importance=None):
    """Mean squared error of what is decoded, weighted by ``weight`` of mean 1."""
    coded = encode_rows(name, rows, importance, pool)
    assert coded.dtype == np.uint8 and coded.shape == (len(rows), FORMATS[name].row_bytes(rows.shape[1]))
    return float(np.mean((FORMATS[name].decode(coded) - rows) ** 2 * weight))


@pytest.mark.parametrize("name", PEER)
def test_the_error_is_at_most_llama_quantizes(name, pool):
    rng = np.random.default_rng()
    rows = rng.standard_normal((32, 4096), np.float32)
    importance = importance_of(rng, 4096)  # of so many that their luck is a fourth of what is allowed
    plain, weighted = PEER[name]
    assert error(name, rows, 1, pool) <= 1.05 * plain
    assert error(name, rows, importance, pool, importance) <= 1.05 * weighted


@pytest.mark.parametrize("name", PEER)
@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_heavy_tails_and_any_scale(name, scale, pool):
    rng = np.random.default_rng()
    rows = (rng.standard_t(3, (16, 512)) * scale).astype(np.float32)
    part = 256 if "K" in name or name == "IQ4_XS" else 32
    largest = np.abs(rows.reshape(16, -1, part)).max(axis=-1)
    coded = FORMATS[name].decode(encode_rows(name, rows, None, pool))
    wrong = np.abs(coded - rows).reshape(16, -1, part).max(axis=-1)
    assert (wrong <= largest * WORST.get(name, 0.2)).all()


@pytest.mark.parametrize("name", PEER)
def test_small_weights_keep_their_places(name, pool):
    """Where f16 holds scales as subnormal numbers, a scale rounded toward zero would clip the largest weights."""
    rows = np.random.default_rng().standard_normal((128, 512), np.float32)
    assert error(name, rows * np.float32(1e-5), 1e10, pool) <= 2 * error(name, rows, 1, pool)


@pytest.mark.parametrize("name", PEER)
def test_zeros_constants_and_single_weights(name, pool):
    rows = np.zeros((4, 512), np.float32)
    rows[1] = 0.75
    rows[2] = -0.75
    rows[3, 40] = 2.0
    decoded = FORMATS[name].decode(encode_rows(name, rows, None, pool))
    assert np.isfinite(decoded).all() and not decoded[0].any()
    np.testing.assert_allclose(decoded[1:3], rows[1:3], rtol=0.05)
    assert decoded[3, 40] == pytest.approx(2.0, rel=0.15) and not decoded[3, 256:].any()


@pytest.mark.parametrize("name", PEER)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_weights_too_small_for_a_scale_are_next_to_nothing(name, weighted, pool):
    """As the rows of tokens that no training text has: without a warning, and without harm to the blocks beside them."""
    rng = np.random.default_rng()
    rows = rng.standard_normal((64, 512), np.float32)
    importance = importance_of(rng, 512) if weighted else None
    small = rows.copy()
    small[1::2, :256] *= (10.0 ** rng.uniform(-46, -20, (32, 1))).astype(np.float32)
    decoded = FORMATS[name].decode(encode_rows(name, small, importance, pool))
    assert (np.abs(decoded[1::2, :256] - small[1::2, :256]) <= 2.0**-23).all()  # steps of f16 are of 2^-24
    beside = FORMATS[name].decode(encode_rows(name, rows, importance, pool))
    np.testing.assert_array_equal(decoded[0::2], beside[0::2])
    np.testing.assert_array_equal(decoded[1::2, 256:], beside[1::2, 256:])


@pytest.mark.parametrize("kind", ["NF4", "scales of NF4", "INT8"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_weights_that_only_f32_scales_hold(kind):
    """Blocks from 1e-43 to 1: no weight is further off than half a step, but for what numbers so small cannot tell apart."""
    rng = np.random.default_rng()
    rows = rng.standard_normal((256, 256)).astype(np.float32)
    smallest_alone = kind == "scales of NF4"  # whose mean is taken off
    sizes = (10.0 ** rng.uniform(-42, -39 if smallest_alone else 0, (256, 1))).astype(np.float32)
    small = rows * sizes
    if kind == "INT8":
        codes, scale = int8.encode(small)
        decoded, step = codes * scale, scale
    elif kind == "NF4":
        packed, largest = nf4.encode(small.reshape(-1))
        decoded = hfblocks.NF4_TABLE[np.stack([packed >> 4, packed & 15], 1)].reshape(-1, 64) * largest[:, None]
        decoded, step = decoded.reshape(small.shape), np.repeat(largest, 64).reshape(small.shape) * 0.31
    else:
        codes, top, offset = nf4.encode_scales(np.abs(small).reshape(-1))
        decoded = nf4.dynamic_map()[codes].reshape(small.shape) * top[:, None] + np.float32(offset)
        small, step = np.abs(small), top[:, None] * 0.1
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - small) <= 0.501 * step + 127 * 1.5e-45).all()


@pytest.mark.parametrize(("name", "reach"), EXACT_LEVELS.items())
def test_whole_levels_come_back(name, reach, pool):
    """Weights that a format holds exactly are found by its search."""
    rng = np.random.default_rng()
    low, high = reach
    levels = rng.integers(low, high + 1, (8, 4, 32)).astype(np.float32)
    levels[:, :, 0], levels[:, :, 1] = low, high
    if name == "Q8_0":
        levels[:, :, 0] = -127
    rows = (levels * np.float32(0.125) + np.float32(0.0 if low < 0 else -0.5)).reshape(8, 128)
    np.testing.assert_allclose(FORMATS[name].decode(encode_rows(name, rows, None, pool)), rows, atol=1e-6)


@pytest.mark.parametrize("name", PEER)
def test_rows_do_not_depend_on_their_company(name, pool):
    rng = np.random.default_rng()
    rows = rng.standard_normal((300, 768), np.float32)
    importance = importance_of(rng, 768)
    for given in (None, importance):
        whole = encode_rows(name, rows, given, pool)
        for row in rng.integers(0, 300, 5):
            np.testing.assert_array_equal(encode_rows(name, rows[row : row + 1], given, pool)[0], whole[row])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K"])
def test_rows_longer_than_a_piece(name, pool):
    rng = np.random.default_rng()
    rows = rng.standard_normal((3, 160 * 1024), np.float32)
    importance = importance_of(rng, rows.shape[1])
    half = rows.shape[1] // 2
    assert error(name, rows, 1, pool) < 0.01
    scaled = (
        importance.copy()
    )  # the importance of a part counts against the row's mean, which is the same for both halves
    scaled[half:] = scaled[:half]
    whole = encode_rows(name, np.concatenate([rows[:, :half], rows[:, :half]], axis=1), scaled, pool)
    np.testing.assert_array_equal(whole[:, : whole.shape[1] // 2], whole[:, whole.shape[1] // 2 :])


@pytest.mark.parametrize("name", PEER)
def test_columns_never_seen_are_fitted_all_the_same(name, pool):
    rng = np.random.default_rng()
    rows = rng.standard_normal((8, 512), np.float32)
    importance = np.zeros(512, np.float32)
    plain = error(name, rows, 1, pool)
    assert error(name, rows, 1, pool, importance) == plain
    importance[256:] = 1
    assert error(name, rows, 1, pool, importance) <= 1.2 * plain


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_a_scale_beyond_f16_is_refused(name, pool):
    rows = np.full((1, 256), 3e9, np.float32)
    rows[0, ::2] = -3e9
    with pytest.raises(FormatError, match="f16"):
        encode_rows(name, rows, None, pool)
