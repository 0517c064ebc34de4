"""Rows of stored matrices, chosen and turned over, as weights of their own."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import ModelError
from engine.formats import FORMATS, Tensor
from engine.program.weights import select, single, transposed


def stored(array, name):
    encoded = FORMATS[name].encode(array)
    return Tensor("w", array.shape, FORMATS[name], encoded.reshape(-1))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("index", [slice(3, 9), np.array([7, 0, 4, 4])], ids=["slice", "order"])
def test_selected_rows(name, index):
    tensor = stored(np.random.default_rng().standard_normal((12, 64), np.float32), name)
    part = select("part", single("w", tensor), index)
    assert (part.name, part.format, part.shape) == ("part", name, tensor.dense()[index].shape)
    np.testing.assert_array_equal(part.dense(), tensor.dense()[index])
    np.testing.assert_array_equal(part.rows(), tensor.rows()[index])
    np.testing.assert_array_equal(part.rows(1, 3), tensor.rows()[index][1:3])
    np.testing.assert_array_equal(part.rows(2, 99), part.rows(2))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_transposed_matrices(name):
    tensor = stored(np.random.default_rng().standard_normal((12, 40), np.float32), name)
    turned = transposed(single("w", tensor))
    assert (turned.format, turned.shape) == (name, (40, 12))
    np.testing.assert_array_equal(turned.dense(), tensor.dense().T)
    np.testing.assert_array_equal(FORMATS[name].decode(turned.rows()), tensor.dense().T)
    np.testing.assert_array_equal(turned.rows(5, 9), turned.rows()[5:9])
    part = select("part", turned, slice(10, 30))
    np.testing.assert_array_equal(FORMATS[name].decode(part.rows(1, 4)), tensor.dense().T[11:14])


def test_blocks_cannot_be_transposed():
    with pytest.raises(ModelError, match="Q8_0"):
        transposed(single("w", stored(np.ones((4, 32), np.float32), "Q8_0")))


def test_rows_that_are_not_there():
    with pytest.raises(ModelError, match="needs 5 rows"):
        select("part", single("w", stored(np.ones((4, 8), np.float32), "F32")), slice(1, 5))
