"""Kernels of layers whose memory does not grow with the tokens, beside the references, on every variant."""

import numpy as np
import pytest
from one_kernel import ISAS, run_kernel

from engine.ops import OPS, evaluate
from engine.ops.cases import dense_weight

PLACE = ("seq_starts", "query_offsets", "page_table")
OPERANDS = {
    "causal_conv": (("x",), ("weight",), "tail"),
    "gated_delta": (("qkv", "decay", "beta"), ("rate", "bias"), "memory"),
}


def run(op, case, state, isa, threads):
    inputs, weights, _ = OPERANDS[op]
    given = [case.inputs[name] for name in (*inputs, *PLACE)]
    dense = [dense_weight(case.weights[name]) for name in weights]
    numbers = dict(case.attrs)
    if op == "causal_conv":
        numbers |= dict(zip(("columns", "width"), dense[0].shape, strict=True))
    width = given[0].shape[1] if op == "causal_conv" else case.attrs["value_heads"] * case.attrs["value_dim"]
    dims = {"T": case.dims.T, "S": case.dims.S, "P": case.inputs["page_table"].shape[1]}
    shape = (case.dims.T, width)
    [y] = run_kernel(
        op, dims, given, [(shape, np.float32)], weights=dense, states=[state], numbers=numbers, isa=isa, threads=threads
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
def test_a_token_without_a_number_spoils_its_own_sequence_alone(isa):
    case = list(OPS["gated_delta"].cases(np.random.default_rng()))[1]
    decay, state = case.inputs["decay"], np.array(case.states["memory"])
    decay[4] = np.nan  # the only token of the third of four sequences
    y = run("gated_delta", case, state, isa, 2)
    assert np.isnan(y[4]).all() and np.isfinite(np.delete(y, 4, axis=0)).all()
