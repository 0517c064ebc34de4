"""head_linear and concat_heads against loops."""

import numpy as np

from engine.ops import OPS, evaluate
from engine.ops.cases import dense_weight
from engine.ops.dense import linear


def test_head_linear_is_each_head_s_linear(rng):
    for case in OPS["head_linear"].cases(rng):
        (got,), _ = evaluate(OPS["head_linear"], case)
        weight = dense_weight(case.weights["weight"])
        heads, n, k = weight.shape
        for head in range(heads):
            (want,) = linear(x=case.inputs["x"][:, head * k : (head + 1) * k], weight=weight[head])
            np.testing.assert_allclose(got[:, head * n : (head + 1) * n], want, rtol=1e-5, atol=1e-6)


def test_concat_heads_takes_each_head_from_both(rng):
    for case in OPS["concat_heads"].cases(rng):
        (got,), _ = evaluate(OPS["concat_heads"], case)
        heads = case.attrs["heads"]
        a, b = (np.split(case.inputs[name], heads, axis=1) for name in ("a", "b"))
        assert np.array_equal(got, np.hstack([part for pair in zip(a, b, strict=True) for part in pair]))
