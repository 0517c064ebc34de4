"""Each op's providers beside the op's reference."""

import pytest

from engine.backend.v1 import providers_of
from engine.ops import OPS
from engine.testing.checks import check_op
from engine.testing.cuts import check_cuts


def test_agrees_with_the_reference(op, device, rng):
    checked = check_op(device, OPS[op], rng)
    if not checked.ran:
        pytest.skip(f"every case is left to the reference: {next(iter(checked.refused.values()))}")


@pytest.mark.parametrize("recurrent", ["causal_conv", "gated_delta", "ssm_scan"])
def test_no_bit_depends_on_how_a_prompt_is_cut(recurrent, device, rng):
    if not all(provider.batch_invariant for provider in providers_of(device).get(recurrent, ())):
        pytest.skip("the backend says that it may depend on what else is in a step")
    if not check_cuts(device, OPS[recurrent], rng):
        pytest.skip("the op is left to the reference")
