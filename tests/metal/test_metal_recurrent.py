"""The ops of recurrent layers beside their references, and the memory that they take."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from engine.backend.v1 import providers_of
from engine.ops import OPS
from engine.testing.cases import all_cases
from engine.testing.checks import check_op
from engine.testing.cuts import check_cuts
from engine.testing.running import Bench

STATES = {"causal_conv": "tail", "gated_delta": "memory", "ssm_scan": "memory"}


@pytest.mark.parametrize("op", STATES)
def test_it_agrees_with_the_reference(op, device):
    checked = check_op(device, OPS[op], np.random.default_rng())
    assert checked.ran and not checked.refused


@pytest.mark.parametrize("op", STATES)
def test_it_is_the_same_however_a_prompt_is_cut(op, device):
    assert check_cuts(device, OPS[op], np.random.default_rng())


@pytest.mark.parametrize("op", STATES)
def test_a_step_copies_no_state(op, device):
    """However many blocks there are, a step takes memory for those alone that its sequences go on from."""
    rng, state = np.random.default_rng(), STATES[op]
    provider, size = providers_of(device)[op][0], 32 << 20
    for case in all_cases(OPS[op], rng):
        few = case.states[state]
        many = np.concatenate([few, np.zeros((-(-size // few[0].nbytes), *few.shape[1:]), np.float32)])
        bench = Bench(device, OPS[op], replace(case, states={state: many}))
        fn = bench.bind(provider)
        with bench.loaded(provider, bench.case) as frame:
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            fn(frame)
            mx.eval(list(frame.values.values()), list(frame.states.values()))
            assert mx.get_peak_memory() - before < size // 4, case.name
