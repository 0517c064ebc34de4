"""linear and quantize against exact evaluation, and the bitwise promises of linear."""

import numpy as np
import pytest
from one_kernel import DOT_ISAS, NATIVE_ISAS, POOLS, native, run_kernel
from weight_cases import (
    DENSE,
    FORMATS,
    LARGE_BLOCKS,
    QUANTIZED,
    Weight,
    alloc,
    dequantized,
    layout_of,
    multiplied,
    random_weight,
    read_by,
    span_of,
)

from engine.ops.dense import SPANS, dequantize_q8, quantize_q8
from engine_cpu.weights import activation

ROWS = (1, 2, 3, 5, 8, 9, 17, 41, 49)
BATCH = 64
SHAPES = [(1, 256), (15, 512), (16, 256), (72, 1280), (200, 512)]
SMALL_BLOCKS = [(72, 96), (200, 32), (16, 1312)]  # depths that are no multiple of 256
ANY_DEPTH = [(1, 1), (15, 33), (200, 129)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def shapes_of(name: str) -> list[tuple[int, int]]:
    return SHAPES + SMALL_BLOCKS * (name not in LARGE_BLOCKS) + ANY_DEPTH * (name in DENSE)


def random_x(rng: np.random.Generator, rows: int, depth: int) -> np.ndarray:
    """Rows of different size, with outliers."""
    x = rng.standard_normal((rows, depth), np.float32) * rng.lognormal(0, 2, (rows, 1)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 30
    return x


def run_linear(
    x: np.ndarray, weights: list[Weight], *, isa: str, threads: int = 2, dim: str = "T", layout: str = "", **more
) -> list[np.ndarray]:
    """x as the weights' kernels read it, made by the references: f32, bf16 and the one layout of 8 bits that suits them all."""
    biases = [(i, b) for i, b in enumerate(more.get("bias", [])) if b is not None]
    layout = layout or layout_of(*(w.name for w in weights))
    read = [read_by(w.name, x, layout) for w in weights]
    packed, plain = (next((a for a in place if a is not None), None) for place in zip(*read, strict=True))
    return run_kernel(
        "linear",
        {dim: len(x)},
        [packed, plain, more.get("residual")],
        [((len(x), len(w.values)), np.float32) for w in weights],
        weights=[w.packed for w in weights] + [b for _, b in biases],
        numbers={"rows_dim": "TSR".index(dim), "bias": sum(1 << i for i, _ in biases)},
        isa=isa,
        threads=threads,
    )


def assert_near(got: np.ndarray, x: np.ndarray, weight: Weight) -> None:
    """Within 1e-5 of the sum of absolute products of the exact result."""
    a, w = multiplied(weight.name, x).astype(np.float64), weight.values.astype(np.float64)
    assert np.all(np.abs(got - a @ w.T) <= 1e-5 * (np.abs(a) @ np.abs(w).T) + 1e-30)


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_linear_is_near_the_exact_product_and_independent_of_the_batch(rng, name, isa):
    for columns, depth in shapes_of(name):
        weight = random_weight(rng, name, columns, depth)
        x = random_x(rng, BATCH, depth)
        [whole] = run_linear(x, [weight], isa=isa)
        assert_near(whole, x, weight)
        for rows in ROWS:
            first = int(rng.integers(0, BATCH - rows + 1))
            [part] = run_linear(x[first : first + rows], [weight], isa=isa, dim="R")
            assert np.array_equal(part, whole[first : first + rows]), (columns, depth, rows)


def at_the_limits(rng: np.random.Generator, rows: int, depth: int) -> np.ndarray:
    """q8g32 rows of the least and the greatest bytes, in runs, as a scale that a model fixes may give them."""
    q = np.where(rng.random((rows, depth // 8)) < 0.5, -128, 127).astype(np.int8).repeat(8, 1)
    q[0] = -128
    sums = -q.reshape(rows, -1, 16).sum(-1, dtype=np.int32)
    parts = (q, np.full((rows, depth // 32), 0.25, np.float32), sums)
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1)


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize(
    ("name", "first", "end"),  # which bytes of a block are codes
    [
        ("W8S", 4, 36), ("W8M", 8, 40), ("W4Z", 3, 19), ("Q8_0", 2, 34), ("Q4_0", 2, 18),
        ("Q4_1", 4, 20), ("Q5_0", 2, 22), ("Q5_1", 4, 24), ("IQ4_NL", 2, 18), ("MXFP4", 1, 17), ("IQ4_XS", 8, 136),
        ("Q4_K", 16, 144), ("Q5_K", 16, 176), ("Q6_K", 0, 192), ("Q3_K", 0, 96), ("Q2_K", 16, 80), ("IQ3_XXS", 2, 98),
    ],
)  # fmt: skip
def test_the_greatest_bytes_do_not_overflow(rng, name, first, end, isa):
    raw = random_weight(rng, name, 64, 512).raw.reshape(64, 2 if name in LARGE_BLOCKS else 16, -1).copy()
    for i, byte in enumerate((0x00, 0x7F, 0x80, 0xFF)):
        raw[16 * i : 16 * i + 12, :, first:end] = byte
    raw = raw.reshape(64, -1)
    packed = alloc(name, 64, 512)
    native.pack_into(packed, raw)
    for rows in (1, 3, 12, 60):
        x = at_the_limits(rng, rows, 512)
        [y] = run_kernel(
            "linear", {"T": rows}, [x, None, None], [((rows, 64), np.float32)], weights=[packed],
            numbers={"rows_dim": 0, "bias": 0}, isa=isa,
        )  # fmt: skip
        a, w = dequantize_q8(x).astype(np.float64), dequantized(name, raw).astype(np.float64)
        assert np.all(np.abs(y - a @ w.T) <= 1e-5 * (np.abs(a) @ np.abs(w).T) + 1e-30)


@pytest.mark.parametrize("isa", DOT_ISAS)
def test_long_rows_and_many_blocks_keep_the_bits(rng, isa):
    """Depths and row counts past every block and chunk of the kernels."""
    for name, columns, depth, rows in (
        ("Q4_K", 65, 16384, 60),
        ("Q5_K", 65, 16384, 60),
        ("Q2_K", 65, 8192, 60),
        ("Q6_K", 130, 512, 700),
        ("MXFP4", 64, 544, 600),
        ("IQ4_XS", 65, 8192, 60),
        ("IQ2_S", 65, 4096, 60),
        ("BF16", 64, 300, 600),
        ("BF16", 130, 1063, 530),
        ("F16", 65, 1031, 300),
        ("W4Z", 65, 8192, 60),
        ("FP8", 64, 544, 600),
        ("NF4", 65, 4096, 60),
    ):
        weight = random_weight(rng, name, columns, depth)
        x = random_x(rng, rows, depth)
        [whole] = run_linear(x, [weight], isa=isa, threads=3)
        assert_near(whole[:10], x[:10], weight)
        for row in rng.integers(0, rows, 20):
            [alone] = run_linear(x[row : row + 1], [weight], isa=isa)
            assert np.array_equal(alone[0], whole[row])


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_threads_do_not_change_the_bits(rng, isa, rows):
    for name in FORMATS:
        weight = random_weight(rng, name, 500, 256)
        x = random_x(rng, rows, 256)
        [one] = run_linear(x, [weight], isa=isa, threads=1)
        for threads in (2, 3):
            [more] = run_linear(x, [weight], isa=isa, threads=threads)
            assert np.array_equal(one, more), (name, threads)


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_fused_is_bitwise_the_separate_ops(rng, isa, rows):
    names, sizes = ("Q4_K", "Q8_0", "BF16", "Q6_K", "Q5_K", "Q2_K", "IQ4_XS"), (300, 64, 33, 1, 65, 16, 40)
    weights = [random_weight(rng, name, size, 512) for name, size in zip(names, sizes, strict=True)]
    bias = [None, rng.standard_normal(64, np.float32), rng.standard_normal(33, np.float32), None, None, None, None]
    x = random_x(rng, rows, 512)
    for threads in (1, 3):
        fused = run_linear(x, weights, bias=bias, isa=isa, threads=threads)
        for got, weight, b in zip(fused, weights, bias, strict=True):
            [alone] = run_linear(x, [weight], isa=isa, layout="q8g128")
            assert np.array_equal(got, alone if b is None else alone + b)
            residual = random_x(rng, rows, len(weight.values))
            [added] = run_linear(x, [weight], bias=[b], residual=residual, isa=isa, threads=threads, layout="q8g128")
            assert np.array_equal(added, residual + got)


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", SPANS)
def test_quantize_is_the_reference(rng, isa, layout, threads):
    for rows, depth in ((1, SPANS[layout]), (1, 4096), (5, 3 * SPANS[layout]), (33, 1024)):
        x = random_x(rng, rows, depth)
        x[0, :32] = 0
        x[-1, -32:] = rng.standard_normal(32) * 1e-43  # a subnormal scale
        x[0, -128:] *= np.float32(1e-43) if rows > 1 else 1
        numbers = {"width": depth, "span": SPANS[layout]}
        shape = (rows, depth * 11 // 8)
        [got] = run_kernel("quantize", {"T": rows}, [x], [(shape, np.uint8)], numbers=numbers, isa=isa, threads=threads)
        assert np.array_equal(got, quantize_q8(x, layout))
        fixed = float(np.float32(rng.lognormal()))
        numbers |= {"scale": fixed}
        [saturated] = run_kernel("quantize", {"T": rows}, [x], [(shape, np.uint8)], numbers=numbers, isa=isa)
        assert np.array_equal(saturated, quantize_q8(x, layout, fixed))
        numbers |= {"choices": 2, "scale": 0}
        [twice] = run_kernel(
            "quantize", {"T": rows}, [np.tile(x, (2, 1))], [((2 * rows, shape[1]), np.uint8)], numbers=numbers, isa=isa
        )
        assert np.array_equal(twice, np.tile(got, (2, 1)))


def test_each_format_asks_for_the_layout_that_its_kernels_read():
    """Which these are, the products of rows with unequal scales above show."""
    assert {name: activation(name) for name in QUANTIZED} == {name: layout_of(name) for name in QUANTIZED}


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_whose_parts_are_of_very_different_size(rng, name, isa):
    """Sums go from the scale of one span to that of the next: from none at all to the largest, and back."""
    weight = random_weight(rng, name, 80, 1024)
    x = rng.standard_normal((60, 8, 128), np.float32)
    sizes = np.array([0, 1e-44, 1e-38, 1e-30, 1e-7, 1, 1e7, 1e25], np.float32)
    x *= np.where(
        np.arange(60)[:, None] < 30, rng.choice(sizes, (60, 8)), rng.permuted(np.tile(sizes, (60, 1)), axis=1)
    )[..., None]
    x = x.reshape(60, 1024)
    [whole] = run_linear(x, [weight], isa=isa)
    assert_near(whole, x, weight)
    for row in rng.integers(0, 60, 6):
        assert np.array_equal(run_linear(x[row : row + 1], [weight], isa=isa)[0][0], whole[row])


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_stay_so_and_alone(rng, isa, bad):
    x = random_x(rng, 12, 256)
    x[3, 100] = bad
    for name in (*QUANTIZED, "F32"):
        weight = random_weight(rng, name, 70, 256)
        packed, plain = None, x
        if name in QUANTIZED:
            shape, numbers = (12, 256 * 11 // 8), {"width": 256, "span": span_of(name)}
            [packed] = run_kernel("quantize", {"T": 12}, [x], [(shape, np.uint8)], numbers=numbers, isa=isa)
            plain = None
        [y] = run_kernel(
            "linear", {"T": 12}, [packed, plain, None], [((12, 70), np.float32)], weights=[weight.packed], isa=isa
        )
        assert np.isfinite(np.delete(y, 3, 0)).all() and not np.isfinite(y[3]).any(), name


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_bf16_is_multiplied_by_the_instruction_for_it(isa):
    """vdpbf16ps alone takes subnormal numbers for 0, so that a variant built without it would show."""
    x, y = np.full((1, 64), 0x7000, np.uint16), np.full((1, 64), np.nan, np.float32)  # 2 ** 97
    packed = alloc("BF16", 64, 64)
    native.pack_into(packed, np.full((64, 64), 0x0040, "<u2").view(np.uint8))  # 2 ** -127
    dims = [1] + [0] * (len(native.DIMS) - 1)
    segment = native.Segment(POOLS[1], dims, 1, isa=isa)
    segment.value(0, x.nbytes, "1")
    segment.value(1, y.nbytes, "1")
    segment.add("linear", [-1, 0, -1], [1], [packed])
    segment.finish([0], [1])
    segment.run(dims, [x], [y])
    assert np.all(y == (0.0 if isa in ("amx", "avx512") else 64 * 2.0**-30))


@pytest.mark.parametrize("isa", DOT_ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_embed_gives_the_rows(rng, name, isa):
    weight = random_weight(rng, name, 150, 256)
    ids = rng.integers(0, 150, 40).astype(np.int32)
    ids[[5, 6]] = -1, 150
    for numbers in ({}, {"scale": 16.0}):
        [y] = run_kernel(
            "embed",
            {"T": 40},
            [ids],
            [((40, 256), np.float32)],
            weights=[weight.packed],
            numbers=numbers,
            isa=isa,
            threads=3,
        )
        known = (ids >= 0) & (ids < 150)
        assert np.array_equal(y[known], weight.values[ids[known]] * np.float32(numbers.get("scale", 1)))
        assert np.isnan(y[~known]).all()


def test_wrong_arguments_are_named(rng):
    quantized, dense = random_weight(rng, "Q8_0", 8, 32), random_weight(rng, "F32", 8, 32)
    x = random_x(rng, 2, 32)
    out = [((2, 8), np.float32)]
    with pytest.raises(ValueError, match="q8g32"):
        run_kernel("linear", {"T": 2}, [None, x, None], out, weights=[quantized.packed])
    with pytest.raises(ValueError, match="f32"):
        run_kernel("linear", {"T": 2}, [quantize_q8(x, "q8g32"), None, None], out, weights=[dense.packed])
    with pytest.raises(ValueError, match="bias"):
        run_kernel("linear", {"T": 2}, [None, x, None], out, weights=[dense.packed, np.zeros(7)], numbers={"bias": 1})
    with pytest.raises(ValueError, match="no matrix"):
        run_kernel("linear", {"T": 2}, [None, x, None], out, weights=[np.zeros(7)])
