"""The ops of recurrent layers beside their references, also with padding behind the sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.backend.registry import open_device
from engine.ops import OPS
from engine.testing.cases import all_cases
from engine.testing.checks import check_op
from engine.testing.running import Bench

STATES = {"causal_conv": "tail", "gated_delta": "memory", "ssm_scan": "memory"}


@pytest.mark.parametrize("op", STATES)
def test_it_agrees_with_the_reference(op):
    checked = check_op(open_device("jax", {}), OPS[op], np.random.default_rng())
    assert checked.ran and not checked.refused


@pytest.mark.parametrize("op", STATES)
def test_padding_changes_nothing(op):
    """Rows of NaN behind, of a sequence in the null block and of one without a token."""
    device, [*_, case] = open_device("jax", {}), all_cases(OPS[op], np.random.default_rng())
    inputs, tokens, sequences = dict(case.inputs), case.dims.T + 3, case.dims.S + 2
    for name in {"x", "qkv", "decay", "beta", "xbc", "dt"} & inputs.keys():
        inputs[name] = np.concatenate([inputs[name], np.full((3, inputs[name].shape[1]), np.nan, np.float32)])
    inputs["query_offsets"] = np.append(inputs["query_offsets"], [tokens, tokens]).astype(np.int32)
    inputs["seq_starts"] = np.append(inputs["seq_starts"], [0, 0]).astype(np.int32)
    inputs["page_table"] = np.concatenate([inputs["page_table"], np.zeros((2, case.dims.P), np.int32)])
    padded = Bench(device, OPS[op], replace(case, inputs=inputs, dims=replace(case.dims, T=tokens, S=sequences)))
    [provider] = device.providers()[op]
    got, ([want], states) = padded.run(provider, padded.bind(provider), padded.case), padded.reference(case)
    np.testing.assert_allclose(got.outputs[0][: case.dims.T], want, 1e-4, 1e-4)
    np.testing.assert_allclose(got.states[STATES[op]][1:], states[STATES[op]][1:], 1e-4, 1e-4)  # block 0 is nobody's
