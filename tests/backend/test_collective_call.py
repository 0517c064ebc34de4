"""What ranks tell each other before they exchange values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.v1 import CollectiveCall, CollectivesError

calls = st.builds(
    CollectiveCall,
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.sampled_from(["f32", "f16", "bf16", "i32"]),
    st.lists(st.integers(0, 1 << 40), max_size=8).map(tuple),
    st.integers(0, 7),
)


@given(calls, calls)
def test_calls_are_the_same_bytes_if_they_are_the_same(one: CollectiveCall, other: CollectiveCall):
    assert len(one.encoded()) == CollectiveCall.BYTES
    assert (one.encoded() == other.encoded()) == (one == other)
    one.check_same(0, [one.encoded()] * 3)
    if one != other:
        with pytest.raises(CollectivesError, match=r"Rank 1 called .* where rank 0 called .*alike"):
            one.check_same(0, [one.encoded(), other.encoded()])


def test_a_difference_is_said_in_full():
    here, there = CollectiveCall("all_gather", "f16", (3, 4), 1), CollectiveCall("all_reduce", "f32", ())
    with pytest.raises(CollectivesError) as caught:
        here.check_same(2, [there.encoded()])
    assert str(caught.value) == (
        "Rank 0 called all_reduce(f32[]) where rank 2 called all_gather(f16[3, 4], axis 1); all ranks must call the same"
        " with values that are alike."
    )


def test_parts_and_refusals():
    assert CollectiveCall("all_to_all", "i32", (6, 2)).part(3) == (2, 2)
    for shape in ((), (7, 2)):
        with pytest.raises(CollectivesError, match="does not fall into 3 equal parts"):
            CollectiveCall("all_to_all", "i32", shape).part(3)
    with pytest.raises(CollectivesError, match="cannot be sent"):
        CollectiveCall("all_reduce", "float64", (1,))
    with pytest.raises(CollectivesError, match="with 9 axes"):
        CollectiveCall("all_reduce", "f32", (1,) * 9)
