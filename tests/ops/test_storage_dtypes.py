"""Storage tags against NumPy and ml_dtypes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import OpError
from engine.ops.dtypes import from_f32, storage_tag, to_f32

ml_dtypes = pytest.importorskip("ml_dtypes", reason="the oracle for bf16 is in the test extra")

FLOATS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3), elements=st.floats(width=32))


@given(FLOATS)
def test_bf16_rounds_to_nearest_even(values):
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    got = from_f32(values, "bf16")
    assert got.dtype == np.uint16 and got.shape == values.shape
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(to_f32(got, "bf16")[nan]).all()


def test_every_bf16_comes_back():
    every = np.arange(2**16, dtype=np.uint16)
    finite = every[np.isfinite(to_f32(every, "bf16"))]
    assert np.array_equal(from_f32(to_f32(finite, "bf16"), "bf16"), finite)


@given(FLOATS)
def test_f16_and_f32(values):
    with np.errstate(over="ignore"):
        assert np.array_equal(from_f32(values, "f16"), values.astype(np.float16), equal_nan=True)
    assert np.array_equal(to_f32(from_f32(values, "f32"), "f32"), values, equal_nan=True)


def test_whole_numbers_round_to_even_and_saturate():
    values = np.array([0.5, 1.5, -2.5, 127.6, -1e9, np.inf, -np.inf, np.nan], np.float32)
    assert from_f32(values, "int8").tolist() == [0, 2, -2, 127, -127, 127, -127, 0]
    assert from_f32(values, "int16").tolist() == [0, 2, -2, 128, -32767, 32767, -32767, 0]


@given(FLOATS)
def test_fp8_rounds_to_nearest_even_and_saturates(values):
    with np.errstate(all="ignore"):
        expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    got = from_f32(values, "fp8")
    assert got.dtype == np.uint8 and got.shape == values.shape
    assert np.array_equal(got, np.where(np.isfinite(values), expected, 0x7F))


def test_every_fp8_number_is_read_and_comes_back():
    every = np.arange(256, dtype=np.uint8)
    read = to_f32(every, "fp8")
    assert np.array_equal(read, every.view(ml_dtypes.float8_e4m3fn).astype(np.float32), equal_nan=True)
    assert np.array_equal(from_f32(read, "fp8"), np.where(every & 0x7F == 0x7F, 0x7F, every))
    between = (read[:126] + read[1:127]) / 2
    for values in (between, -between, np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(1e9))):
        assert np.array_equal(from_f32(values, "fp8"), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_narrowing_leaves_a_strided_source_alone():
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(to_f32(from_f32(source[:, ::2], "bf16"), "bf16"), source[:, ::2])
    stored = from_f32(source, "f32")
    assert storage_tag(stored) == "f32"


def test_a_dtype_without_a_tag_is_named():
    with pytest.raises(OpError, match="float64"):
        storage_tag(np.zeros(2))
