"""Each op's providers beside the op's reference."""

import pytest

from engine.ops import OPS
from engine.testing.checks import check_op


def test_agrees_with_the_reference(op, device, rng):
    checked = check_op(device, OPS[op], rng)
    if not checked.ran:
        pytest.skip(f"every case is left to the reference: {next(iter(checked.refused.values()))}")
