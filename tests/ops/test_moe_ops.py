"""moe_route, moe_linear and moe_combine against loops."""

import math

import numpy as np
import pytest

from engine.errors import OpError
from engine.ops import OPS, evaluate
from engine.ops.cases import dense_weight
from engine.ops.dense import linear
from engine.ops.moe import moe_combine, moe_linear, moe_route


def test_route_against_loops(rng):
    for case in OPS["moe_route"].cases(rng):
        (ids, weights), _ = evaluate(OPS["moe_route"], case)
        a = {**OPS["moe_route"].attrs, **case.attrs}
        given = {name: dense_weight(weight) for name, weight in case.weights.items()}
        experts = case.inputs["logits"].shape[1]
        bias, own = given.get("correction_bias", np.zeros(experts)), given.get("expert_scale", np.ones(experts))
        for row, (chosen, got) in enumerate(zip(ids, weights, strict=True)):
            logits = [float(v) for v in case.inputs["logits"][row]]
            if a["score"] == "softmax":
                powers = [math.exp(v - max(logits)) for v in logits]
                scores = [power / math.fsum(powers) for power in powers]
            else:
                scores = [1 / (1 + math.exp(-v)) for v in logits]
            choice = [score + float(b) for score, b in zip(scores, bias, strict=True)]
            size = len(choice) // a["groups"]
            members = [range(g * size, (g + 1) * size) for g in range(a["groups"])]
            worth = [sum(sorted((choice[e] for e in group), reverse=True)[: a["group_best"]]) for group in members]
            kept = sorted(range(len(worth)), key=lambda g: (-worth[g], g))[: a["groups_kept"]]
            best = sorted((e for g in kept for e in members[g]), key=lambda e: (-choice[e], e))[: a["k"]]
            assert chosen.tolist() == best
            total = sum(scores[e] for e in best) if a["renormalize"] else 1
            np.testing.assert_allclose(got, [scores[e] / total * own[e] * a["scale"] for e in best], rtol=1e-6)


def test_a_correction_bias_chooses_and_does_not_weigh():
    logits, bias = np.array([[2, 1, 0, -1]], np.float32), np.array([0, 0, 0, 1], np.float32)
    ids, weights = moe_route(logits=logits, correction_bias=bias, k=2, score="sigmoid", renormalize=False)
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(-logits[:, [3, 0]])), rtol=1e-6)


def test_route_takes_the_lowest_ids_on_ties():
    ids, weights = moe_route(logits=np.array([[1, 3, 1, 3, 3, 1]], np.float32), k=4)
    assert ids.tolist() == [[1, 3, 4, 0]]
    assert weights.sum() == pytest.approx(1)


def test_route_refuses_an_unknown_score():
    with pytest.raises(OpError, match="softmax and sigmoid and not tanh"):
        moe_route(logits=np.zeros((1, 2), np.float32), k=1, score="tanh")


def test_linear_is_each_expert_s_linear(rng):
    for case in OPS["moe_linear"].cases(rng):
        (got,), _ = evaluate(OPS["moe_linear"], case)
        weight, ids, x = dense_weight(case.weights["weight"]), case.inputs["ids"], case.inputs["x"]
        bias = dense_weight(case.weights["bias"]) if "bias" in case.weights else np.zeros(weight.shape[:2], np.float32)
        choices = ids.shape[1]
        assert got.shape == (ids.size, weight.shape[1])
        for token, choice in np.ndindex(ids.shape):
            row = token * choices + choice
            source = x[row] if case.attrs["per_choice"] else x[token]
            (want,) = linear(x=source[None], weight=weight[ids[token, choice]])
            assert np.array_equal(got[row], want[0] + bias[ids[token, choice]])


def test_a_group_is_its_linears(rng):
    for case in OPS["moe_linear_group"].cases(rng):
        got, _ = evaluate(OPS["moe_linear_group"], case)
        assert len(got) == sum(name.startswith("weight") for name in case.weights)
        for i, y in enumerate(got):
            own = {name: f"{name}.{i}" for name in ("weight", "bias") if f"{name}.{i}" in case.weights}
            arguments = {name: dense_weight(case.weights[place]) for name, place in own.items()}
            (want,) = moe_linear(**case.inputs, **arguments, **case.attrs)
            assert np.array_equal(y, want)


def test_combine_sums_in_order_of_choice(rng):
    for case in OPS["moe_combine"].cases(rng):
        (got,), _ = evaluate(OPS["moe_combine"], case)
        y, weights = case.inputs["y"], case.inputs["weights"]
        want = np.zeros_like(got)
        for token, choice in np.ndindex(weights.shape):
            want[token] += weights[token, choice] * y[token * weights.shape[1] + choice]
        assert np.array_equal(got, want)


def test_equal_experts_are_one_linear(rng):
    x, weight = rng.standard_normal((5, 16), np.float32), rng.standard_normal((8, 16), np.float32)
    ids, weights = moe_route(logits=rng.standard_normal((5, 4)).astype(np.float32), k=2)
    (y,) = moe_linear(x=x, ids=ids, weight=np.stack([weight] * 4))
    (mixed,), (one,) = moe_combine(y=y, weights=weights), linear(x=x, weight=weight)
    np.testing.assert_allclose(mixed, one, rtol=1e-5, atol=1e-5)
