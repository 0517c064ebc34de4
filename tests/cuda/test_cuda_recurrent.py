"""What layers remember is left in the same bits however a prompt is cut, and whatever runs beside it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.ops import OPS
from engine.testing.cuts import check_cuts


@pytest.mark.parametrize("op", ["causal_conv", "gated_delta", "ssm_scan"])
def test_it_is_the_same_however_a_prompt_is_cut(op, device):
    assert check_cuts(device, OPS[op], np.random.default_rng())
