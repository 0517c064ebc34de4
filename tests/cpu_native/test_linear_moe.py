"""moe_route, moe_linear and moe_combine: against the references, and bitwise against linear."""

import numpy as np
import pytest
from one_kernel import DOT_ISAS, ISAS, native, run_kernel
from weight_cases import QUANTIZED, alloc, dequantized, layout_of, multiplied, random_rows, read_by

from engine.ops import moe


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def choose(rng: np.random.Generator, tokens: int, experts: int, k: int) -> np.ndarray:
    return np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("per_choice", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "names",
    [("Q4_K", "Q4_K"), ("F16",), ("BF16",), *((name,) for name in QUANTIZED), ("Q8_0", "Q2_K", "MXFP4", "Q5_K")],
)
def test_moe_linear_is_bitwise_linear_with_each_expert(rng, names, biased, per_choice, isa):
    for tokens, experts, k, columns, depth in (
        (1, 8, 2, 72, 256),
        (7, 4, 3, 16, 512),
        (90, 5, 2, 130, 256),
        (3, 1, 1, 1, 256),
    ):
        raw = [random_rows(rng, name, experts * columns, depth).reshape(experts, columns, -1) for name in names]
        weights = [alloc(name, columns, depth, experts) for name in names]
        for weight, rows in zip(weights, raw, strict=True):
            for e in range(experts):
                native.pack_into(weight, rows[e], 0, e)
        having = list(range(len(names)))[-2:] if biased else []  # of several the last two
        biases = [rng.standard_normal((experts, columns), np.float32) for _ in having]
        ids = choose(rng, tokens, experts, k)
        x = rng.standard_normal((tokens * k if per_choice else tokens, depth), np.float32)
        layout = layout_of(*names)
        packed, plain = read_by(names[0], x, layout)
        got = run_kernel(
            "moe_linear",
            {"T": tokens},
            [packed, plain, ids],
            [((tokens, k, columns), np.float32)] * len(names),
            weights=[*weights, *biases],
            numbers={"k": k, "per_choice": per_choice, "bias": sum(2**i for i in having)},
            isa=isa,
            threads=3,
        )
        rows_of_x = (
            np.arange(tokens * k).reshape(tokens, k)
            if per_choice
            else np.repeat(np.arange(tokens), k).reshape(tokens, k)
        )
        for i, (name, rows, y) in enumerate(zip(names, raw, got, strict=True)):
            for e in range(experts):
                single = alloc(name, columns, depth)
                native.pack_into(single, rows[e])
                [want] = run_kernel(
                    "linear",
                    {"T": len(x)},
                    [packed, plain, None],
                    [((len(x), columns), np.float32)],
                    weights=[single, biases[having.index(i)][e]] if i in having else [single],
                    numbers={"bias": i in having},
                    isa=isa,
                )
                assert np.array_equal(y[ids == e], want[rows_of_x[ids == e]])
                want = want - biases[having.index(i)][e] if i in having else want
                a = multiplied(name, x[:1], layout)
                w = dequantized(name, rows[e])
                assert np.all(np.abs(want[:1] - a @ w.T) <= 1e-5 * (np.abs(a) @ np.abs(w).T) + 1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_moe_route_is_the_reference(rng, score, renormalize, isa):
    for tokens, experts, k in ((1, 8, 2), (50, 60, 6), (4, 3, 3), (9, 1, 1)):
        logits = np.round(rng.standard_normal((tokens, experts)) * 4).astype(np.float32) / 2  # with ties
        want_ids, want = moe.moe_route(logits=logits, k=k, score=score, renormalize=renormalize, scale=1.5)
        numbers = {"experts": experts, "k": k, "score": score == "sigmoid", "renormalize": renormalize, "scale": 1.5}
        ids, weights = run_kernel(
            "moe_route",
            {"T": tokens},
            [logits],
            [((tokens, k), np.int32), ((tokens, k), np.float32)],
            numbers=numbers,
            isa=isa,
        )
        assert np.array_equal(ids, want_ids)
        assert np.allclose(weights, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_moe_route_of_nan_still_names_experts(isa):
    logits = np.array([[np.nan, 1, np.nan, 0], [np.nan] * 4, [-np.inf] * 4], np.float32)
    numbers = {"experts": 4, "k": 3, "score": 0, "renormalize": 1}
    ids, weights = run_kernel(
        "moe_route", {"T": 3}, [logits], [((3, 3), np.int32), ((3, 3), np.float32)], numbers=numbers, isa=isa
    )
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2], [0, 1, 2]]
    assert np.isnan(weights).all()


@pytest.mark.parametrize("isa", ISAS)
def test_moe_route_of_nan_in_groups_still_names_experts(isa):
    logits = np.array([[np.nan, 1, 2, 0, 5, 4, 3, 1], [np.nan] * 8, [np.inf, *[-np.inf] * 7]], np.float32)
    numbers = {"experts": 8, "k": 4, "score": 0, "renormalize": 1, "groups": 4, "groups_kept": 2, "group_best": 2}
    ids, _ = run_kernel(
        "moe_route", {"T": 3}, [logits], [((3, 4), np.int32), ((3, 4), np.float32)], numbers=numbers, isa=isa
    )
    assert all(len(set(row)) == 4 and set(row) <= set(range(8)) for row in ids.tolist())


@pytest.mark.parametrize("isa", ISAS)
def test_moe_combine_is_the_ordered_sum(rng, isa):
    for tokens, k, width in ((1, 2, 64), (13, 3, 33)):
        y = rng.standard_normal((tokens * k, width), np.float32)
        weights = rng.random((tokens, k), np.float32)
        residual = rng.standard_normal((tokens, width), np.float32)
        [want] = moe.moe_combine(y=y, weights=weights)
        for added in (None, residual):
            [got] = run_kernel(
                "moe_combine",
                {"T": tokens},
                [y, weights, added],
                [((tokens, width), np.float32)],
                numbers={"k": k, "width": width},
                isa=isa,
                threads=3,
            )
            assert np.array_equal(got, want if added is None else residual + want)
