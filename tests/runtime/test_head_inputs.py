"""The arrays of the head's rows, which are kept from step to step where they may be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine import SamplingParams
from engine.runtime.head_inputs import HeadInputs, RowParams


class Counts:
    """A matcher whose mask is how often it was asked."""

    only_ends = False

    def __init__(self) -> None:
        self.asked = 0

    def fill(self, mask: np.ndarray) -> None:
        self.asked += 1
        mask[:] = self.asked


def rows() -> list[RowParams]:
    bias = (np.array([4, 9], np.int32), np.array([0.5, -2.0], np.float32))
    return [
        RowParams(SamplingParams(temperature=0.7, top_k=5), 3, 0, 1),
        RowParams(SamplingParams(temperature=0.0), 8, 1, 2**40 + 7, want=3),
        RowParams(SamplingParams(logit_bias={4: 0.5, 9: -2.0}), 2, 0, 5, bias=bias),
        RowParams(SamplingParams(min_tokens=4), 2, 0, 5, banned=(1, 2)),
    ]


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=6), st.integers(8, 12)), max_size=8))
def test_what_is_kept_is_what_would_be_made_anew(steps: list[tuple[list[int], int]]):
    known, kept = rows(), HeadInputs(4)
    for chosen, count in steps:
        params = [known[n] for n in chosen]
        counts = [None if n == 2 and count == 9 else count - 6 for n in chosen]
        got, anew = kept.of(params, counts), HeadInputs(4).of(params, counts)
        assert (got.wanted, got.biased, got.masked) == (anew.wanted, anew.biased, anew.masked)
        assert got.arrays.keys() == anew.arrays.keys()
        for name, array in got.arrays.items():
            assert array.dtype == anew.arrays[name].dtype
            np.testing.assert_array_equal(array, anew.arrays[name])


def test_steady_rows_get_the_same_arrays_and_others_what_is_new():
    steady, later = rows()[:3], rows()[3]
    inputs = HeadInputs(4)
    first = inputs.of(steady, [10, 10, 10])
    assert inputs.of(steady, [11, 11, 11]) is first
    assert inputs.of(steady[:2], [12, 12]) is not first
    assert inputs.of([later], [3]).biased == 2 and inputs.of([later], [6]).biased == 0
    matcher = Counts()
    masked = RowParams(SamplingParams(), 2, 0, 5, matcher=matcher)
    assert [int(inputs.of([masked], [n]).arrays["masks"][0, 0]) for n in (3, 4, 5)] == [1, 2, 3]
