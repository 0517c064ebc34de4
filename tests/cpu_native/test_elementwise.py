"""Norms, activations, rope, add and gather_rows against float64 definitions."""

import math

import numpy as np
import pytest
from one_kernel import ISAS, run_kernel

every_isa = pytest.mark.parametrize("isa", ISAS)
WIDTHS = [1, 15, 16, 17, 64, 100, 288, 1024]


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@every_isa
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dim", ["T", "R"])
def test_rms_norm(isa: str, width: int, dim: str) -> None:
    rng = np.random.default_rng()
    x = rng.standard_normal((5, width), np.float32) * rng.lognormal(0, 3, (5, 1)).astype(np.float32)
    weight = rng.standard_normal(width, np.float32)
    numbers = {"width": width, "eps": 1e-5, "weight_offset": 1, "rows_dim": 0 if dim == "T" else 2}
    (y,) = run_kernel("rms_norm", {dim: 5}, [x], [(x.shape, np.float32)], weights=[weight], numbers=numbers, isa=isa)
    np.testing.assert_allclose(y, rms(x, weight.astype(np.float64) + 1, 1e-5), rtol=2e-6, atol=1e-30)


@every_isa
@pytest.mark.parametrize("weights", [1, 6])
def test_rms_norm_of_heads(isa: str, weights: int) -> None:
    rng = np.random.default_rng()
    x = rng.standard_normal((3, 6 * 40), np.float32)
    weight = rng.standard_normal(weights * 40, np.float32)
    numbers = {"width": 240, "eps": 1e-6, "head_dim": 40}
    (y,) = run_kernel("rms_norm", {"T": 3}, [x], [(x.shape, np.float32)], weights=[weight], numbers=numbers, isa=isa)
    np.testing.assert_allclose(y, rms(x.reshape(3, 6, 40), weight.reshape(weights, 40), 1e-6).reshape(3, -1), rtol=2e-6)


@every_isa
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(isa: str, width: int) -> None:
    rng = np.random.default_rng()
    x, residual = (rng.standard_normal((4, width), np.float32) for _ in range(2))
    weight = rng.standard_normal(width, np.float32)
    total, normed = run_kernel(
        "add_rms_norm",
        {"T": 4},
        [x, residual],
        [(x.shape, np.float32)] * 2,
        weights=[weight],
        numbers={"eps": 1e-6},
        isa=isa,
    )
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_allclose(normed, rms(x + residual, weight, 1e-6), rtol=2e-6)


@every_isa
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(isa: str, width: int, biased: bool) -> None:
    rng = np.random.default_rng()
    x = rng.standard_normal((4, width), np.float32) + 2
    vectors = [rng.standard_normal(width, np.float32) for _ in range(1 + biased)]
    (y,) = run_kernel(
        "layer_norm", {"T": 4}, [x], [(x.shape, np.float32)], weights=vectors, numbers={"eps": 1e-5}, isa=isa
    )
    wide = x.astype(np.float64)
    wide -= wide.mean(-1, keepdims=True)
    wide = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * vectors[0]
    np.testing.assert_allclose(y, wide + (vectors[1] if biased else 0), rtol=1e-5, atol=1e-5)


def activations(x: np.ndarray) -> list[np.ndarray]:
    """silu, gelu, gelu_tanh, relu in float64, each without cancellation."""
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        silu = x / (1 + np.exp(-x))
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        tanh = x / (1 + np.exp(-2 * u))
    erf = x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2))
    return [silu, erf, tanh, np.maximum(x, 0)]


@every_isa
@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("gated", [False, True])
def test_gated_act(isa: str, kind: int, gated: bool) -> None:
    rng = np.random.default_rng()
    gate = np.linspace(-6, 12, 3 * 177, dtype=np.float32).reshape(3, 177)
    up = rng.standard_normal(gate.shape, np.float32) if gated else None
    (y,) = run_kernel(
        "gated_act", {"T": 3}, [gate, up], [(gate.shape, np.float32)], numbers={"width": 177, "kind": kind}, isa=isa
    )
    wanted = activations(gate)[kind] * (up if gated else 1)
    np.testing.assert_allclose(y, wanted, rtol=4e-6, atol=1e-30)


@every_isa
@pytest.mark.parametrize("kind", range(4))
def test_gated_act_at_the_limits(isa: str, kind: int) -> None:
    gate = np.array([[0, -0.0, 1e-30, 50, 200, 1e4, -15, -200, -1e4, np.inf, np.nan]], np.float32)
    (y,) = run_kernel(
        "gated_act",
        {"T": 1},
        [gate, None],
        [(gate.shape, np.float32)],
        numbers={"width": gate.shape[1], "kind": kind},
        isa=isa,
    )
    np.testing.assert_allclose(
        y[0, :6], np.where(gate[0, :6] > 1, gate[0, :6], activations(gate[0, :6])[kind]), rtol=1e-5
    )
    assert (np.abs(y[0, 6:9]) < 1e-5).all()
    assert y[0, 9] == np.inf and np.isnan(y[0, 10])


@every_isa
@pytest.mark.parametrize("alpha,limit", [(1.702, 7.0), (0.7, 1.5)])
def test_clamped_swiglu(isa: str, alpha: float, limit: float) -> None:
    rng = np.random.default_rng()
    gate, up = (rng.standard_normal((3, 177), np.float32) * np.float32(6) for _ in range(2))
    gate[0, :5], up[1, :4] = (np.inf, -np.inf, np.nan, 1e4, -1e4), (np.inf, -np.inf, np.nan, 0)
    numbers = {"width": 177, "kind": 4, "alpha": alpha, "limit": limit}
    (y,) = run_kernel("gated_act", {"T": 3}, [gate, up], [(gate.shape, np.float32)], numbers=numbers, isa=isa)
    g, u = np.minimum(gate.astype(np.float64), limit), np.clip(up.astype(np.float64), -limit, limit)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = g / (1 + np.exp(-alpha * g)) * (u + 1)
    wanted[0, 1] = y[0, 1]  # -inf * 0: no activation is asked to know it
    np.testing.assert_allclose(y, wanted, rtol=4e-6, atol=2e-6)


@every_isa
@pytest.mark.parametrize("head_dim,rotary_dim", [(64, 64), (8, 8), (80, 32), (64, 16), (96, 96)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(isa: str, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    rng = np.random.default_rng()
    tokens, heads, scale = 7, 3, 1.25
    x = rng.standard_normal((tokens, heads * head_dim), np.float32)
    positions = rng.integers(0, 1 << 20, tokens, dtype=np.int32)
    positions[:2] = 0, 1_000_000
    frequencies = (10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
    numbers = {
        "heads": heads, "head_dim": head_dim, "rotary_dim": rotary_dim, "interleaved": interleaved, "scale": scale,
    }  # fmt: skip
    (y,) = run_kernel(
        "rope", {"T": tokens}, [x, positions], [(x.shape, np.float32)], weights=[frequencies], numbers=numbers, isa=isa
    )
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)[:, None]
    cosine, sine = np.cos(angles) * scale, np.sin(angles) * scale
    wanted = x.reshape(tokens, heads, head_dim).astype(np.float64)
    half = rotary_dim // 2
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    a, b = wanted[..., first].copy(), wanted[..., second].copy()
    wanted[..., first], wanted[..., second] = a * cosine - b * sine, b * cosine + a * sine
    np.testing.assert_allclose(y, wanted.reshape(tokens, -1), rtol=1e-6, atol=2e-6)


@every_isa
def test_add_and_gather_rows(isa: str) -> None:
    rng = np.random.default_rng()
    x, y = (rng.standard_normal((9, 77), np.float32) for _ in range(2))
    (total,) = run_kernel("add", {"T": 9}, [x, y], [(x.shape, np.float32)], numbers={"width": 77}, isa=isa)
    np.testing.assert_array_equal(total, x + y)
    rows = rng.permutation(9)[:4].astype(np.int32)
    dims = {"T": 9, "R": 4}
    (picked,) = run_kernel("gather_rows", dims, [x, rows], [((4, 77), np.float32)], numbers={"width": 77}, isa=isa)
    np.testing.assert_array_equal(picked, x[rows])


@every_isa
def test_rows_do_not_depend_on_the_step(isa: str) -> None:
    rng = np.random.default_rng()
    x, up = (rng.standard_normal((33, 205), np.float32) for _ in range(2))
    weight = rng.standard_normal(205, np.float32)
    positions = rng.integers(0, 5000, 33, dtype=np.int32)

    def run(rows: slice, threads: int) -> list[np.ndarray]:
        dims, shape = {"T": len(x[rows])}, (x[rows].shape, np.float32)
        numbers = {"width": 205, "eps": 1e-6, "kind": 1, "heads": 1, "head_dim": 205, "rotary_dim": 180}
        common = {"numbers": numbers, "isa": isa, "threads": threads}
        return [
            *run_kernel("add_rms_norm", dims, [x[rows], up[rows]], [shape] * 2, weights=[weight], **common),
            *run_kernel("layer_norm", dims, [x[rows]], [shape], weights=[weight, weight], **common),
            *run_kernel("gated_act", dims, [x[rows], up[rows]], [shape], **common),
            *run_kernel("rope", dims, [x[rows], positions[rows]], [shape], weights=[np.abs(weight[:90])], **common),
        ]

    whole = run(slice(None), 1)
    for rows, threads in ((slice(None), 2), (slice(None), 3), (slice(7, 8), 2), (slice(20, 33), 3)):
        for a, b in zip(whole, run(rows, threads), strict=True):
            np.testing.assert_array_equal(a[rows].view(np.int32), b.view(np.int32))
