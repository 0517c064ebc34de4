"""Weights lie on the device as they are stored, or exactly as they are decoded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.formats import FORMATS
from engine.testing.cases import CaseWeight
from engine_jax.blocks import DECODERS
from engine_jax.weights import PLAIN, ROWS, pack

SHAPES = [(5, 512), (3, 7, 256)]
BITS = {"Q4_0": 4.5, "Q4_1": 5.5, "Q8_0": 8.5, "Q2_K": 8, "Q3_K": 6, "Q4_K": 6, "Q5_K": 10, "Q6_K": 10}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format_", [*DECODERS, *PLAIN])
def test_numbers_are_those_of_the_reference(format_, shape):
    check(format_, shape)


def test_weights_of_many_rows_are_read_in_pieces():
    check("Q8_0", (ROWS + 1, 64))
    check("BF16", (2, ROWS, 8))


def check(format_, shape):
    rng = np.random.default_rng()
    rows = rng.integers(0, 256, (int(np.prod(shape[:-1])), FORMATS[format_].row_bytes(shape[-1])), np.uint8)
    with np.errstate(all="ignore"):
        want = FORMATS[format_].decode(rows).reshape(shape)
    packed = pack(CaseWeight("w", (format_, rows, shape)), jnp.asarray, lambda count: None)
    got = packed.unpack()
    finite = np.isfinite(want)
    assert np.array_equal(got[finite], want[finite])
    assert not np.isfinite(got[~finite]).any()
    weight = packed.handle.weight
    some = rng.integers(0, shape[0], 4)
    assert np.array_equal(np.asarray(weight.take(some).as_dtype(jnp.float32))[finite[some]], want[some][finite[some]])
    if format_ in BITS:
        assert packed.nbytes * 8 / want.size == BITS[format_]


def test_other_formats_are_decoded_and_vectors_are_f32():
    rng = np.random.default_rng()
    rows = rng.integers(32, 64, (6, FORMATS["IQ4_XS"].row_bytes(256)), np.uint8)
    packed = pack(CaseWeight("w", ("IQ4_XS", rows, (6, 256))), jnp.asarray, lambda count: None)
    assert np.array_equal(packed.unpack(), FORMATS["IQ4_XS"].decode(rows))
    vector = rng.standard_normal(33, np.float32).astype(np.float16)
    packed = pack(CaseWeight("w", ("F16", vector.view(np.uint8)[None], (33,))), jnp.asarray, lambda count: None)
    assert packed.handle.weight.codes.dtype == jnp.float32 and np.array_equal(packed.unpack(), vector)


def test_a_packed_weight_is_a_tree_of_arrays():
    rows = np.random.default_rng().integers(0, 256, (4, FORMATS["Q4_K"].row_bytes(256)), np.uint8)
    weight = pack(CaseWeight("w", ("Q4_K", rows, (4, 256))), jnp.asarray, lambda count: None).handle.weight
    leaves, tree = jax.tree.flatten(weight)
    assert [leaf.dtype for leaf in leaves] == [jnp.uint8, jnp.float32, jnp.float32]
    assert jax.tree.unflatten(tree, leaves).packed
