"""Norms and activations that pack their rows: the bits of the plain row quantized, whatever form is asked for."""

import numpy as np
import pytest
from one_kernel import ISAS, run_kernel

from engine.ops.dense import SPANS, quantize_q8

every_isa = pytest.mark.parametrize("isa", ISAS)
WIDTHS = [32, 96, 128, 160, 1024, 1056, 3072]
every_form = pytest.mark.parametrize(
    ("width", "layout"), [(width, layout) for layout, span in SPANS.items() for width in WIDTHS if width % span == 0]
)
F32, U8 = np.float32, np.uint8

# kernel -> its inputs of the rows' shape, weights as wide, numbers, outputs before the normed or activated one
KERNELS = {
    "rms_norm": (1, 1, {"eps": 1e-6, "weight_offset": 1}, 0),
    "add_rms_norm": (2, 1, {"eps": 1e-5}, 1),
    "layer_norm": (1, 2, {"eps": 1e-5}, 0),
    "gated_act": (2, 0, {"kind": 0}, 0),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def rows_of(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Rows of different size with outliers, some groups zero, tiny or next to the largest number."""
    x = rng.standard_normal((rows, width), F32) * rng.lognormal(0, 2, (rows, 1)).astype(F32)
    x[rng.random(x.shape) < 0.02] *= 50
    for group in np.split(x, range(32, width, 32), axis=1):
        group[rng.random(rows) < 0.1] *= rng.choice(np.array([0, 1e-30, 1e-38, 1e15], F32))
    return x


class Asked:
    """One kernel's rows, run with the plain and the packed output as asked for."""

    def __init__(self, rng: np.random.Generator, kernel: str, rows: int, width: int, **numbers: float) -> None:
        inputs, weights, defaults, self.before = KERNELS[kernel]
        self.kernel, self.shape = kernel, (rows, width)
        self.inputs = [rows_of(rng, rows, width) for _ in range(inputs)]
        self.weights = [rng.standard_normal(width, F32) for _ in range(weights)]
        self.numbers = defaults | {"width": width} | numbers

    def run(
        self, *forms: str, isa: str, rows: slice = slice(None), threads: int = 2, dim: str = "T"
    ) -> list[np.ndarray]:
        """The outputs, those that are not among ``forms`` absent (None)."""
        count = len(self.inputs[0][rows])
        plain, packed = ((count, self.shape[1]), F32), ((count, self.shape[1] * 11 // 8), U8)
        outputs = [plain] * self.before + [plain if "plain" in forms else None, packed if "packed" in forms else None]
        return run_kernel(
            self.kernel,
            {dim: count},
            [x[rows] for x in self.inputs] + [None] * (self.kernel == "gated_act" and len(self.inputs) == 1),
            outputs,
            weights=self.weights,
            numbers=self.numbers | {"rows_dim": "TSR".index(dim)},
            isa=isa,
            threads=threads,
        )


@every_isa
@every_form
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_forms_agree_bit_by_bit(rng, kernel, width, layout, isa):
    asked = Asked(rng, kernel, 5, width, span=SPANS[layout])
    *before, plain = asked.run("plain", isa=isa)
    *same, both, packed = asked.run("plain", "packed", isa=isa)
    *again, alone = asked.run("packed", isa=isa)
    assert np.array_equal(both.view(np.int32), plain.view(np.int32)) and np.array_equal(packed, alone)
    for sums in (same, again):
        assert all(np.array_equal(a, b) for a, b in zip(before, sums, strict=True))
    assert np.array_equal(packed, quantize_q8(plain, layout))


@every_isa
@pytest.mark.parametrize(("width", "span"), [(352, 32), (384, 128)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_packed_row_does_not_depend_on_the_step(rng, kernel, width, span, isa):
    """Nor on whether one thread does all of it: 33 rows are too many for that, and one is not."""
    asked = Asked(rng, kernel, 33, width, span=span)
    whole = asked.run("packed", isa=isa, threads=1)[-1]
    for rows, threads, dim in ((slice(None), 3, "R"), (slice(4, 5), 2, "T"), (slice(9, 33), 2, "T")):
        assert np.array_equal(asked.run("packed", isa=isa, rows=rows, threads=threads, dim=dim)[-1], whole[rows])


@every_isa
@pytest.mark.parametrize("kind", range(4))
def test_an_activation_without_a_gate(rng, kind, isa):
    asked = Asked(rng, "gated_act", 3, 160, kind=kind)
    asked.inputs = asked.inputs[:1]
    plain, packed = asked.run("plain", "packed", isa=isa)
    assert np.array_equal(packed, quantize_q8(plain, "q8g32"))


@every_isa
def test_clamped_swiglu_of_several_choices(rng, isa):
    """Rows are T * choices, as experts have them."""
    x = [rows_of(rng, 6, 96) for _ in range(2)]
    numbers = {"width": 96, "kind": 4, "alpha": 1.7, "limit": 7.0, "choices": 2}
    outputs = [((6, 96), F32), ((6, 132), U8)]
    plain, packed = run_kernel("gated_act", {"T": 3}, x, outputs, numbers=numbers, isa=isa)
    assert np.isfinite(plain).all() and np.array_equal(packed, quantize_q8(plain, "q8g32"))


@every_isa
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_alone(rng, bad, isa):
    asked = Asked(rng, "rms_norm", 4, 256)
    asked.inputs[0][2, 77] = bad
    plain, packed = asked.run("plain", "packed", isa=isa)
    assert np.array_equal(packed, quantize_q8(plain, "q8g32"), equal_nan=False)
    scales = packed[:, 256 : 256 + 32].copy().view(F32)
    assert not np.isfinite(scales[2]).all() and np.isfinite(np.delete(scales, 2, 0)).all()


def test_refusals(rng):
    x, weight = rows_of(rng, 2, 40), np.ones(40, F32)
    outputs = [None, ((2, 55), U8)]
    for kernel, inputs, weights in (
        ("rms_norm", [x], [weight]),
        ("layer_norm", [x], [weight]),
        ("gated_act", [x, x], []),
    ):
        numbers = {"width": 40, "eps": 1e-5, "kind": 0}
        for span, words in ((32, "multiple of 32"), (128, "multiple of 128"), (64, "32 or 128")):
            with pytest.raises(ValueError, match=words):
                run_kernel(kernel, {"T": 2}, inputs, outputs, weights=weights, numbers=numbers | {"span": span})
        with pytest.raises(ValueError, match="needs an output"):
            run_kernel(kernel, {"T": 2}, inputs, [None], weights=weights, numbers=numbers)
    with pytest.raises(ValueError, match="whole rows"):  # slices
        run_kernel(
            "rms_norm", {"T": 2}, [rows_of(rng, 2, 64)], [None, ((2, 88), U8)], weights=[weight[:32]],
            numbers={"width": 64, "eps": 1e-5},
        )  # fmt: skip
