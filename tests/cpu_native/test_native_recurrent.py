"""Kernels of layers whose memory does not grow with the tokens, beside the references, on every variant."""

import numpy as np
import pytest
from one_kernel import ISAS, run_kernel

from engine.ops import OPS, evaluate
from engine.ops.cases import dense_weight

PLACE = ("seq_starts", "query_offsets", "page_table")
OPERANDS = {
    "causal_conv": (("x",), ("weight", "bias"), "tail"),
    "gated_delta": (("qkv", "decay", "beta"), ("rate", "bias"), "memory"),
    "ssm_scan": (("xbc", "dt"), ("rate", "bias", "skip"), "memory"),
}


def run(op, case, state, isa, threads):
    inputs, weights, _ = OPERANDS[op]
    given = [case.inputs[name] for name in (*inputs, *PLACE)]
    dense = [dense_weight(case.weights[name]) for name in weights if name in case.weights]
    numbers = dict(case.attrs)
    if op == "causal_conv":
        numbers["silu"] = numbers.pop("act") == "silu"
        numbers |= dict(zip(("columns", "width"), dense[0].shape, strict=True))
    [want], _ = evaluate(OPS[op], case)
    dims = {"T": case.dims.T, "S": case.dims.S, "P": case.inputs["page_table"].shape[1]}
    [y] = run_kernel(
        op,
        dims,
        given,
        [(want.shape, np.float32)],
        weights=dense,
        states=[state],
        numbers=numbers,
        isa=isa,
        threads=threads,
    )
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", OPERANDS)
def test_agrees_with_the_reference(op, isa):
    name = OPERANDS[op][-1]
    for case in OPS[op].cases(np.random.default_rng()):
        [want], states = evaluate(OPS[op], case)
        for threads in (1, 3):
            state = np.array(case.states[name])
            got = run(op, case, state, isa, threads)
            np.testing.assert_allclose(got, want, rtol=5e-5, atol=5e-5, err_msg=case.name)
            np.testing.assert_allclose(state, states[name], rtol=5e-5, atol=5e-5, err_msg=case.name)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("op", "name"), [("gated_delta", "decay"), ("ssm_scan", "dt")])
def test_a_token_without_a_number_spoils_its_own_sequence_alone(op, name, isa):
    case = list(OPS[op].cases(np.random.default_rng()))[1]
    gate, state = case.inputs[name], np.array(case.states["memory"])
    gate[4] = np.nan  # the only token of the third of four sequences
    y = run(op, case, state, isa, 2)
    assert np.isnan(y[4]).all() and np.isfinite(np.delete(y, 4, axis=0)).all()


TOKENS, HEADS, KEYS, VALUES, BLOCK = 100, 2, 24, 150, 40
SIZES = {
    "gated_delta": {"key_heads": 2, "value_heads": HEADS, "key_dim": KEYS, "value_dim": VALUES},
    "ssm_scan": {"groups": 2, "heads": HEADS, "state_dim": KEYS, "head_dim": VALUES},
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", SIZES)
def test_a_prompt_has_the_same_bits_however_it_is_cut(op, isa):
    """More tokens than stay in the scratch, blocks that end amid them, columns of both kinds."""
    rng = np.random.default_rng()
    (_, *gates), vectors, _ = OPERANDS[op]
    widths = (4 * KEYS + HEADS * VALUES, *[HEADS] * len(gates))
    given = [rng.standard_normal((TOKENS, width)).astype(np.float32) for width in widths]
    weights = [-rng.uniform(0.1, 1, HEADS).astype(np.float32) for _ in vectors]
    numbers = SIZES[op] | {"block_size": BLOCK}
    table = np.array([[2, 0, 3]], np.int32)

    def answers(cuts):
        state = np.full((4, HEADS, KEYS, VALUES), np.nan, np.float32)
        results = []
        for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
            place = [np.array([start], np.int32), np.array([0, end - start], np.int32), table]
            dims, output = {"T": end - start, "S": 1, "P": 3}, ((end - start, HEADS * VALUES), np.float32)
            inputs = [*(array[start:end] for array in given), *place]
            results += run_kernel(op, dims, inputs, [output], weights=weights, states=[state], numbers=numbers, isa=isa)
        return np.concatenate(results), state[table[0]]

    whole, left = answers(())
    assert np.isfinite(whole).all()
    for cuts in ((1, 2, 34, 66, 99), range(1, TOKENS), (80,)):
        got, state = answers(tuple(cuts))
        np.testing.assert_array_equal(got, whole)
        np.testing.assert_array_equal(state, left)
