"""Activations rounded to 8 bits, a row a program."""

import triton
import triton.language as tl

from .common import _INTERPRETED, put, to_e4m3, to_nearest


@triton.jit
def _most(values):
    """Whether a row is finite, and its greatest size, 0 where it is not."""
    sizes = tl.abs(values)
    finite = tl.max((~(sizes < float("inf"))).to(tl.int32), axis=0) == 0
    return finite, tl.max(tl.where(finite, sizes, 0.0), axis=0)


@triton.jit
def _in_steps(values, step):
    """values / step, rounded as one division: by the step's inverse and what that leaves, where neither nears a limit."""
    if _INTERPRETED:
        return tl.div_rn(values, step)
    else:
        if (step > 1e-30) & (step < 1e30):
            inverse = tl.div_rn(1.0, step)
            steps = values * inverse
            steps = tl.fma(tl.fma(-steps, step, values), inverse, steps)
        else:
            steps = tl.div_rn(values, step)
        return steps


@triton.jit
def _steps(values, kept, fixed):
    """The row's step, NaN where a value is not finite, and the values in steps, from -128 to 127."""
    finite, most = _most(tl.where(kept, values, 0.0))
    step = tl.where(fixed > 0, fixed, tl.where(most > 0, tl.div_rn(most, 127.5), 1.0))
    steps = tl.minimum(tl.maximum(_in_steps(tl.where(finite, values, 0.0), step), -128.0), 127.0)
    return tl.where(finite, step, float("nan")), to_nearest(steps)


@triton.jit
def to_bytes(x, codes, scales, depth, fixed, BLOCK: tl.constexpr):
    """x [rows, depth] as int8 with a scale a row: ``fixed``, or if that is 0 2 / 255 of the row's greatest size."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    kept = k < depth
    values = tl.load(x + row * depth + k, mask=kept, other=0).to(tl.float32)
    step, steps = _steps(values, kept, fixed)
    tl.store(codes + row * depth + k, steps.to(tl.int8), mask=kept)
    tl.store(scales + row, step)


@triton.jit
def to_fp8(x, codes, scales, depth, BLOCK: tl.constexpr):
    """x [rows, depth] as E4M3 with a scale a row, 1 / 448 of its greatest size; NaN where a value is not finite."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    kept = k < depth
    values = tl.load(x + row * depth + k, mask=kept, other=0).to(tl.float32)
    finite, most = _most(values)
    scale = tl.where(most > 0, tl.div_rn(most, 448.0), 1.0)
    steps = _in_steps(tl.where(finite, values, 0.0), scale)
    if _INTERPRETED:
        made = to_e4m3(steps)
    else:
        made = steps.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes + row * depth + k, made, mask=kept)
    tl.store(scales + row, tl.where(finite, scale, float("nan")))


@triton.jit
def rounded(x, y, depth, fixed, BLOCK: tl.constexpr):
    """The same as numbers."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    kept = k < depth
    values = tl.load(x + row * depth + k, mask=kept, other=0).to(tl.float32)
    step, steps = _steps(values, kept, fixed)
    put(y + row * depth + k, steps * step, kept)
