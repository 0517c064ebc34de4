"""kv_write and kv_copy on the plain layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.backend.v1 import HOST_DTYPES, KVSpec
from engine.ops import OPS, evaluate
from engine.ops.dtypes import from_f32
from engine.ops.kv import PLAIN, WHOLE, kv_copy, kv_write, plain_states, quantize_kv, read_kv


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", PLAIN.dtypes)
def test_plain_states_have_the_shapes_of_the_layout(dtype, latent, rng):
    spec = KVSpec(3, 4, 2, 8, dtype, latent)
    shapes = PLAIN.shapes(spec)
    contents = {kind: rng.standard_normal(shapes[kind][0], np.float32) for kind in (("k",) if latent else ("k", "v"))}
    states = plain_states(spec, contents)
    assert states.keys() == shapes.keys()
    for name, (shape, tag) in shapes.items():
        assert states[name].shape == shape and states[name].dtype == HOST_DTYPES[tag]


def test_kv_write_against_loops(rng):
    for case in OPS["kv_write"].cases(rng):
        kv, slots = case.kv, case.inputs["kv_slots"]
        states = plain_states(kv, case.states)
        before = {name: state.copy() for name, state in states.items()}
        assert kv_write(**case.inputs, **states, **case.attrs) == ()
        assert ("v" in states) != case.attrs["latent"]
        for name in states.keys() & {"k", "v"}:
            want, want_scale = before[name], before.get(f"{name}_scale")
            for slot, row in zip(slots, case.inputs[f"new_{name}"], strict=True):
                for head in range(kv.kv_heads if slot >= 0 else 0):
                    place = slot // kv.block_size, slot % kv.block_size, head
                    values = row[head * kv.head_dim : (head + 1) * kv.head_dim]
                    if want_scale is None:
                        want[place] = from_f32(values, kv.dtype)
                    else:
                        most, largest = np.float32(WHOLE[kv.dtype]), np.abs(values).max()
                        want_scale[place] = largest / most
                        want[place] = [round(float(v * (most / largest))) if largest > 0 else 0 for v in values]
            np.testing.assert_array_equal(states[name], want)
            if want_scale is not None:
                np.testing.assert_array_equal(states[f"{name}_scale"], want_scale)


@pytest.mark.parametrize("dtype", WHOLE)
@given(values=hnp.arrays(np.float32, (3, 16), elements=st.floats(-1e6, 1e6, width=32)))
def test_the_error_of_whole_numbers_is_half_a_step(dtype, values):
    q, scale = quantize_kv(values, dtype)
    back = read_kv(q, scale).astype(np.float64)
    step = np.abs(values).max(axis=1, keepdims=True).astype(np.float64) / WHOLE[dtype]
    assert np.abs(q).max() <= WHOLE[dtype]
    assert (np.abs(back - values) <= step * 0.502 + 1.001e-30).all()  # what is all next to nothing is nothing


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("broken", [np.inf, np.nan])
def test_whole_numbers_keep_a_non_finite_head_non_finite(dtype, broken):
    values = np.ones((2, 8), np.float32)
    values[1, 3] = broken
    back = read_kv(*quantize_kv(values, dtype))
    assert np.isfinite(back[0]).all() and not np.isfinite(back[1]).any()


def test_kv_write_needs_no_contiguous_state(rng):
    whole = np.zeros((2, 3, 4, 2, 8), np.float32)
    k, v = whole.transpose(1, 0, 2, 3, 4)[:, 0], whole.transpose(1, 0, 2, 3, 4)[:, 1]
    new = rng.standard_normal((1, 16), np.float32)
    kv_write(new_k=new, new_v=-new, kv_slots=np.array([9]), k=k, v=v, kv_heads=2, head_dim=8)
    assert np.array_equal(whole[0, 2, 1].reshape(1, 16), new) and np.array_equal(whole[1, 2, 1].reshape(1, 16), -new)


def test_kv_copy_in_order(rng):
    for case in OPS["kv_copy"].cases(rng):
        _, states = evaluate(OPS["kv_copy"], case)
        assert len(states) == (4 if case.kv.dtype in WHOLE else 2)
        for name, start in plain_states(case.kv, case.states).items():
            origin = list(range(case.kv.blocks))  # which block's contents each block has
            for source, destination in case.inputs["block_copies"]:
                origin[destination] = origin[source]
            assert np.array_equal(states[name], start[origin])


def test_kv_copy_of_several_states():
    states = [np.arange(3.0), np.arange(6).reshape(3, 2)]
    kv_copy(block_copies=np.array([[0, 2]]), states=states)
    assert states[0].tolist() == [0, 1, 0] and states[1].tolist() == [[0, 1], [2, 3], [0, 1]]
