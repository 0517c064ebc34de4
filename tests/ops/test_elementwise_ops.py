"""Norms, rope and activations against loops in f64."""

import math
from dataclasses import replace

import numpy as np
import pytest

from engine.errors import OpError
from engine.ops import OPS, evaluate
from engine.ops.activation import add, gated_act
from engine.ops.cases import dense_weight
from engine.ops.dense import quantize
from engine.ops.norm import rms_norm
from engine.ops.position import rope


def loop_rms(row, weight, eps, offset):
    mean_square = sum(float(v) ** 2 for v in row) / len(row)
    return [float(v) / math.sqrt(mean_square + eps) * (float(w) + offset) for v, w in zip(row, weight, strict=True)]


def test_rms_norm_against_loops(rng):
    for case in OPS["rms_norm"].cases(rng):
        (got, *_), _ = evaluate(OPS["rms_norm"], case)
        weight, a = dense_weight(case.weights["weight"]), case.attrs
        for row, out in zip(case.inputs["x"], got, strict=True):
            size = a["head_dim"] or len(row)
            own = weight if a["wide_weight"] else np.tile(weight, len(row) // size)
            want = [
                loop_rms(row[i : i + size], own[i : i + size], a["eps"], a["weight_offset"])
                for i in range(0, len(row), size)
            ]
            np.testing.assert_allclose(out, np.concatenate(want), rtol=1e-6, atol=1e-7)


def test_layer_norm_against_loops(rng):
    for case in OPS["layer_norm"].cases(rng):
        (got, *_), _ = evaluate(OPS["layer_norm"], case)
        weights = {name: dense_weight(w) for name, w in case.weights.items()}
        for row, out in zip(case.inputs["x"], got, strict=True):
            size, want = case.attrs["head_dim"] or len(row), []
            for part in np.split(row, len(row) // size):
                mean = math.fsum(part) / size
                variance = math.fsum((float(v) - mean) ** 2 for v in part) / size
                want += [(float(v) - mean) / math.sqrt(variance + case.attrs["eps"]) for v in part]
            want = want * weights["weight"]
            np.testing.assert_allclose(out, want + weights.get("bias", 0), rtol=1e-5, atol=1e-6)


def test_add_rms_norm_is_add_then_rms_norm(rng):
    for case in OPS["add_rms_norm"].cases(rng):
        (total, normed, *_), _ = evaluate(OPS["add_rms_norm"], case)
        (want,) = add(a=case.inputs["residual"], b=case.inputs["x"])
        weight = dense_weight(case.weights["weight"])
        assert np.array_equal(total, want)
        assert np.array_equal(normed, rms_norm(x=want, weight=weight, **case.attrs)[0])


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "gated_act"])
def test_packed_is_quantize_of_the_last_output(rng, name):
    packing = [case for case in OPS[name].cases(rng) if case.attrs.get("packed")]
    assert len(packing) >= 2
    for case in packing:
        (*plain, packed), _ = evaluate(OPS[name], case)
        unpacked = replace(case, attrs={k: v for k, v in case.attrs.items() if k != "packed"})
        assert all(np.array_equal(a, b) for a, b in zip(plain, evaluate(OPS[name], unpacked)[0], strict=True))
        assert np.array_equal(packed, quantize(x=plain[-1], layout=case.attrs["packed"])[0])
    with pytest.raises(OpError, match="q8g128 and not q4"):
        evaluate(OPS[name], replace(packing[0], attrs={**packing[0].attrs, "packed": "q4"}))


def test_rope_against_complex_rotation(rng):
    for case in OPS["rope"].cases(rng):
        (got,), _ = evaluate(OPS["rope"], case)
        a, freq = case.attrs, dense_weight(case.weights["inv_freq"])
        rotary = a["rotary_dim"] or a["head_dim"]
        half = rotary // 2
        shape = (case.dims.T, a["heads"], a["head_dim"])
        x, y = case.inputs["x"].reshape(shape), got.reshape(shape)
        for token, position in enumerate(case.inputs["positions"]):
            for i in range(half):
                one, two = (2 * i, 2 * i + 1) if a["interleaved"] else (i, i + half)
                turn = a["scale"] * np.exp(1j * float(np.float32(position) * freq[i]))
                want = (x[token, :, one].astype(np.float64) + 1j * x[token, :, two]) * turn
                np.testing.assert_allclose(y[token, :, one] + 1j * y[token, :, two], want, rtol=0, atol=2e-6)
        assert np.array_equal(y[..., rotary:], x[..., rotary:])


def test_rope_scores_depend_on_the_distance_only(rng):
    q, k = rng.standard_normal((2, 1, 32), np.float32)
    freq = 100.0 ** -np.arange(0, 1, 1 / 16, dtype=np.float32)

    def turned(x, position):
        return rope(x=x, positions=np.array([position]), inv_freq=freq, heads=1, head_dim=32)[0]

    np.testing.assert_allclose(turned(q, 9) @ turned(k, 4).T, turned(q, 25) @ turned(k, 20).T, rtol=0, atol=1e-4)


def test_rope_leaves_its_input(rng):
    x = rng.standard_normal((2, 8), np.float32)
    before = x.copy()
    rope(x=x, positions=np.array([3, 4]), inv_freq=np.ones(4, np.float32), heads=1, head_dim=8)
    assert np.array_equal(x, before)


ACTIVATIONS = {
    "silu": lambda v: v / (1 + math.exp(-v)),
    "gelu": lambda v: v * 0.5 * math.erfc(-v / math.sqrt(2)),
    "gelu_tanh": lambda v: v / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "relu": lambda v: max(v, 0.0),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_against_loops(kind, rng):
    gate = (rng.standard_normal((3, 50)) * 3).astype(np.float32)
    up = rng.standard_normal((3, 50), np.float32)
    want = np.array([[ACTIVATIONS[kind](float(v)) for v in row] for row in gate])
    np.testing.assert_allclose(gated_act(gate=gate, kind=kind)[0], want, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gated_act(gate=gate, up=up, kind=kind)[0], want * up, rtol=1e-6, atol=1e-7)


def test_silu_far_out():
    far = np.array([[1000, -1000, 0]], np.float32)
    assert gated_act(gate=far)[0].tolist() == [[1000, 0, 0]]


def test_clamped_swiglu_against_loops(rng):
    gate, up = (rng.standard_normal((4, 30), np.float32) * np.float32(6) for _ in range(2))
    for alpha, limit in ((1.702, 7.0), (0.9, 2.0)):
        (got,) = gated_act(gate=gate, up=up, kind="clamped_swiglu", alpha=alpha, limit=limit)
        for g, u, y in zip(gate.ravel().tolist(), up.ravel().tolist(), got.ravel(), strict=True):
            below, within = min(g, limit), max(-limit, min(u, limit))
            assert y == pytest.approx(below / (1 + math.exp(-alpha * below)) * (within + 1), rel=1e-6)
    with pytest.raises(OpError, match="needs up"):
        gated_act(gate=gate, kind="clamped_swiglu")


def test_unknown_activation_is_named():
    with pytest.raises(OpError, match="silu, gelu, gelu_tanh, relu, sigmoid, identity, clamped_swiglu and not swish"):
        gated_act(gate=np.zeros((1, 2), np.float32), kind="swish")
