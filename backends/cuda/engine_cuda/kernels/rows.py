"""Kernels that work on rows by themselves: norms, activations, sums, gathered rows."""

import triton
import triton.language as tl

from .common import enter, put


@triton.jit
def rms_norm(
    x,
    residual,
    total,
    weight,
    y,
    width,
    weights,
    eps,
    offset,
    ADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A slice of ``width`` a program, x [rows * slices, width]; with ADDED first x + residual, which goes to total. Slices take
    ``weights`` weights in turn."""
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    kept = columns < width
    place = row * width + columns
    values = tl.load(x + place, mask=kept, other=0).to(tl.float32)
    if ADDED:
        values += tl.load(residual + place, mask=kept, other=0).to(tl.float32)
        put(total + place, values, kept)
    size = tl.sqrt_rn(tl.sum(values * values, axis=0) / width + eps)
    scale = tl.load(weight + (row % weights) * width + columns, mask=kept, other=0).to(tl.float32) + offset
    put(y + place, values / size * scale, kept)


@triton.jit
def layer_norm(x, weight, bias, y, width, slices, eps, BIASED: tl.constexpr, WIDTH: tl.constexpr):
    """A slice of ``width`` a program; weight and bias are as long as a row's ``slices``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    kept = columns < width
    place = row * width + columns
    values = tl.load(x + place, mask=kept, other=0).to(tl.float32)
    # The mean of what is left corrects the first one, whose rounding shows in rows far from zero.
    mean = tl.sum(values, axis=0) / width
    mean += tl.sum(tl.where(kept, values - mean, 0.0), axis=0) / width
    centred = tl.where(kept, values - mean, 0.0)
    size = tl.sqrt_rn(tl.sum(centred * centred, axis=0) / width + eps)
    within = (row % slices) * width + columns
    normed = centred / size * tl.load(weight + within, mask=kept, other=0).to(tl.float32)
    if BIASED:
        normed += tl.load(bias + within, mask=kept, other=0).to(tl.float32)
    put(y + place, normed, kept)


@triton.jit
def _tanh(x):
    """1 - 2 / (exp(2 x) + 1), which neither over- nor underflows to anything but its limits."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def gated_act(
    gate, up, y, count, alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Elements by blocks. KIND: silu, gelu, gelu_tanh, relu, sigmoid or clamped_swiglu."""
    enter(EARLY)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = place < count
    g = tl.load(gate + place, mask=kept, other=0).to(tl.float32)
    if GATED:
        u = tl.load(up + place, mask=kept, other=0).to(tl.float32)
    if KIND == "clamped_swiglu":
        # Comparisons, since minima and maxima of the hardware drop NaN.
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        result = g / (1.0 + tl.exp(-alpha * g)) * (u + 1.0)
    else:
        if KIND == "silu":
            result = g / (1.0 + tl.exp(-g))
        elif KIND == "gelu":
            result = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
        elif KIND == "gelu_tanh":
            result = 0.5 * g * (1.0 + _tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
        elif KIND == "sigmoid":
            result = 1.0 / (1.0 + tl.exp(-g))
        elif KIND == "identity":
            result = g
        else:
            result = tl.where(g < 0, 0.0, g)
        if GATED:
            result *= u
    put(y + place, result, kept)


@triton.jit
def add(a, b, y, count, BLOCK: tl.constexpr):
    """Elements by blocks."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = place < count
    total = tl.load(a + place, mask=kept, other=0).to(tl.float32)
    total += tl.load(b + place, mask=kept, other=0).to(tl.float32)
    put(y + place, total, kept)


@triton.jit
def scale_softcap(x, y, count, scale, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Elements by blocks."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = place < count
    values = tl.load(x + place, mask=kept, other=0).to(tl.float32) * scale
    if CAPPED:
        values = softcap * _tanh(values / softcap)
    put(y + place, values, kept)


@triton.jit
def gather_rows(x, rows, y, width, BLOCK: tl.constexpr):
    """Row rows[r] of x as row r of y, a block of columns a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = columns < width
    source = tl.load(rows + row).to(tl.int64)
    tl.store(y + row * width + columns, tl.load(x + source * width + columns, mask=kept), mask=kept)


@triton.jit
def gather_columns(x, columns, y, width, wanted, BLOCK: tl.constexpr):
    """Of x [rows, width] those columns that ``columns`` [wanted] names, whole numbers as f32, in its order."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = place < wanted
    source = tl.load(columns + place, mask=kept, other=0).to(tl.int64)
    put(y + row * wanted + place, tl.load(x + row * width + source, mask=kept, other=0).to(tl.float32), kept)


@triton.jit
def concat_heads(a, b, y, a_width, b_width, BLOCK: tl.constexpr):
    """A head of a row a program: a_width values of a, then b_width of b."""
    head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    first = columns < a_width
    second = (columns >= a_width) & (columns < a_width + b_width)
    values = tl.load(a + head * a_width + columns, mask=first, other=0).to(tl.float32)
    values += tl.load(b + head * b_width + columns - a_width, mask=second, other=0).to(tl.float32)
    put(y + head * (a_width + b_width) + columns, values, first | second)
