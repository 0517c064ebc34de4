"""embed, linear, linear_group and quantize against loops in f64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import OpError
from engine.ops import OPS, evaluate
from engine.ops.cases import dense_weight
from engine.ops.dense import SPANS, dequantize_q8, linear, linear_group, quantize, quantize_q8
from engine.ops.dtypes import from_f32


def loop_linear(x, weight, bias=None, residual=None):
    y = np.zeros((len(x), len(weight)))
    for i, row in enumerate(x.astype(np.float64)):
        for j, column in enumerate(weight.astype(np.float64)):
            y[i, j] = sum(row * column) + (0 if bias is None else bias[j]) + (0 if residual is None else residual[i, j])
    return y


def round_to_bytes(x, scale):
    """Each value to the nearest of 256 steps, those of its row if no scale is given."""
    rows = []
    for row in x:
        step = np.float32(scale) or max(abs(row)) / np.float32(127.5) or np.float32(1)
        rows.append([min(max(round(float(v / step)), -128), 127) * step for v in row])
    return np.array(rows, np.float32)


@pytest.mark.parametrize("op", ["linear", "linear_group"])
def test_no_case_asks_for_the_last_bit_of_a_division(op, rng):
    """XLA multiplies by the reciprocal of a scale that it knows, and rounds what is halfway to the other side."""
    for _ in range(20):
        for case in OPS[op].cases(rng):
            if scale := case.attrs.get("input_scale"):
                steps = case.inputs["x"].astype(np.float64) / scale
                assert np.abs(np.abs(steps - np.floor(steps)) - 0.5).min() > 0.005


def test_linear_against_loops(rng):
    for case in OPS["linear"].cases(rng):
        (got,), _ = evaluate(OPS["linear"], case)
        weights = {name: dense_weight(weight) for name, weight in case.weights.items()}
        x = round_to_bytes(case.inputs["x"], case.attrs["input_scale"]) if case.attrs else case.inputs["x"]
        want = loop_linear(x, weights["weight"], weights.get("bias"), case.inputs.get("residual"))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=4e-6)


def test_linear_group_is_its_linears(rng):
    for case in OPS["linear_group"].cases(rng):
        got, _ = evaluate(OPS["linear_group"], case)
        assert len(got) == sum(name.startswith("weight") for name in case.weights)
        for member, output in enumerate(got):
            weight = dense_weight(case.weights[f"weight.{member}"])
            bias = case.weights.get(f"bias.{member}")
            given = {"weight": weight, "bias": None if bias is None else dense_weight(bias), **case.attrs}
            (single,) = linear(x=case.inputs["x"], **given)
            assert np.array_equal(output, single)


def test_linear_group_without_biases(rng):
    x, weights = rng.standard_normal((3, 8), np.float32), [np.eye(8, dtype=np.float32)] * 2
    assert all(np.array_equal(y, x) for y in linear_group(x=x, weight=weights))


def test_embed(rng):
    for case in OPS["embed"].cases(rng):
        (got,), _ = evaluate(OPS["embed"], case)
        table = dense_weight(case.weights["weight"])
        for row, token in zip(got, case.inputs["ids"], strict=True):
            assert np.array_equal(row, table[token] * np.float32(case.attrs["scale"]))


def test_linear_rounds_activations_where_it_must(rng):
    x = rng.standard_normal((4, 96), np.float32)
    x[1] = 0
    weight = rng.standard_normal((7, 96), np.float32)
    for scale in (0.0, 0.005):
        rounded = np.zeros_like(x)
        for row, values in enumerate(x):
            step = np.float32(scale) or max(abs(values)) / np.float32(127.5)
            steps = [max(-128, min(127, round(float(v / step)))) if v else 0 for v in values]
            rounded[row] = np.array(steps, np.float32) * step
        assert np.abs(rounded - x).max() > (0.5 if scale else 0.001)  # 128 steps of 0.005 do not reach all of x
        required = {"quantized_activation": "required", "input_scale": scale}
        for name, matrix in (("linear", weight), ("linear_group", [weight])):
            (got,) = OPS[name].reference(x=x, weight=matrix, **required)
            np.testing.assert_allclose(got, rounded @ weight.T, rtol=1e-4, atol=1e-4)
        broken = x.copy()
        broken[2, 5] = np.nan
        (got,) = OPS["linear"].reference(x=broken, weight=weight, **required)
        assert np.isnan(got[2]).all() and np.isfinite(got[[0, 1, 3]]).all()


def test_gather_columns_against_loops(rng):
    for case in OPS["gather_columns"].cases(rng):
        x, columns = case.inputs["x"], dense_weight(case.weights["columns"])
        (got,), _ = evaluate(OPS["gather_columns"], case)
        assert got.tolist() == [[row[int(column)] for column in columns] for row in x]


def fields(packed, width):
    """q, scales and nsum16 of one packed row."""
    row = packed.tobytes()
    q = np.frombuffer(row, np.int8, width)
    scale = np.frombuffer(row, np.float32, width // 32, width)
    return q, scale, np.frombuffer(row, np.int32, width // 16, width + width // 8)


def test_quantize_against_loops(rng):
    for case in OPS["quantize"].cases(rng):
        x = case.inputs["x"]
        (packed,), _ = evaluate(OPS["quantize"], case)
        if case.attrs["layout"] == "bf16":
            assert np.array_equal(packed, from_f32(x, "bf16"))
            continue
        assert packed.dtype == np.uint8 and packed.shape == (len(x), x.shape[1] * 11 // 8)
        for row, packed_row in zip(x, packed, strict=True):
            q, scale, nsum16 = fields(packed_row, len(row))
            span = SPANS[case.attrs["layout"]]
            for group in range(len(row) // 32):
                values = row[32 * group // span * span :][:span]
                fixed = np.float32(case.attrs["scale"])
                absmax = max(abs(values))
                assert scale[group] == (fixed or absmax / np.float32(127))
                factor = np.float32(127) / absmax if absmax else 0
                own = row[32 * group : 32 * group + 32]
                ratio = np.array([v / fixed if fixed else v * factor for v in own], np.float32)
                steps = [min(max(round(float(r)), -128), 127) for r in ratio]
                assert q[32 * group : 32 * group + 32].tolist() == steps
            assert nsum16.tolist() == [-sum(q[i : i + 16].tolist()) for i in range(0, len(row), 16)]


@given(hnp.arrays(np.float32, (2, 256), elements=st.floats(-(2.0**60), 2.0**60, width=32)), st.sampled_from([*SPANS]))
def test_quantize_error_is_half_a_step(x, layout):
    back = dequantize_q8(quantize_q8(x, layout)).astype(np.float64)
    spans = (-1, SPANS[layout])
    step = np.abs(x.reshape(spans)).max(axis=1, keepdims=True).astype(np.float64) / 127
    # A subnormal scale is a coarse one: half of its last place, times 127.
    assert (np.abs((back - x).reshape(spans)) <= step * 0.50001 + 2.0**-149 * 64).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_keeps_a_group_non_finite(bad):
    for layout, span in SPANS.items():
        x = np.ones((2, 2 * span), np.float32)
        x[1, span + 8] = bad
        back = dequantize_q8(quantize_q8(x, layout))
        assert np.isfinite(back[0]).all() and np.isfinite(back[1, :span]).all()
        assert not np.isfinite(back[1, span:]).any()


def test_quantize_refuses_what_it_does_not_know():
    with pytest.raises(OpError, match=r"q8g128 and not cpu\.lanes"):
        quantize(x=np.zeros((1, 32), np.float32), layout="cpu.lanes")
    with pytest.raises(OpError, match="multiple of 32"):
        quantize(x=np.zeros((1, 40), np.float32), layout="q8g32")
    with pytest.raises(OpError, match="multiple of 128"):
        quantize(x=np.zeros((1, 160), np.float32), layout="q8g128")
