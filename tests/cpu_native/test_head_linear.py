"""head_linear is, bit by bit, the linear of each head's part."""

import numpy as np
import pytest
from one_kernel import DOT_ISAS, native, run_kernel
from weight_cases import FORMATS, alloc, multiplied, random_rows, read_by


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_is_bitwise_linear_with_each_head(name, isa):
    rng = np.random.default_rng()
    for tokens, heads, columns, depth in ((1, 2, 130, 256), (7, 5, 16, 256), (150, 3, 72, 512), (3, 1, 1, 256)):
        raw = random_rows(rng, name, heads * columns, depth).reshape(heads, columns, -1)
        weight = alloc(name, columns, depth, heads)
        for head in range(heads):
            native.pack_into(weight, raw[head], 0, head)
        x = rng.standard_normal((tokens, heads, depth), np.float32)
        shape, counts = (tokens, heads, columns), {"T": tokens}
        [got] = run_kernel("head_linear", counts, [x], [(shape, np.float32)], weights=[weight], isa=isa, threads=3)
        [one] = run_kernel("head_linear", {"T": 1}, [x[-1:]], [(shape[1:], np.float32)], weights=[weight], isa=isa)
        assert np.array_equal(got[-1], one), "a row does not depend on the others"
        for head in range(heads):
            part = np.ascontiguousarray(x[:, head])
            inputs = [*read_by(name, part), None]
            single = alloc(name, columns, depth)
            native.pack_into(single, raw[head])
            [want] = run_kernel("linear", counts, inputs, [((tokens, columns), np.float32)], weights=[single], isa=isa)
            assert np.array_equal(got[:, head], want)


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_odd_depths(name, isa):
    rng = np.random.default_rng()
    raw = random_rows(rng, name, 3 * 20, 13).reshape(3, 20, -1)
    weight = alloc(name, 20, 13, 3)
    values = []
    for head in range(3):
        native.pack_into(weight, raw[head], 0, head)
        values.append(native.unpack(weight, 0, 20, head))
    x = rng.standard_normal((9, 3, 13), np.float32)
    [got] = run_kernel("head_linear", {"T": 9}, [x], [((9, 3, 20), np.float32)], weights=[weight], isa=isa)
    np.testing.assert_allclose(
        got, np.einsum("thk,hnk->thn", multiplied(name, x), np.stack(values)), rtol=1e-5, atol=1e-5
    )
