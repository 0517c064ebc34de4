"""What the kernels share: rounding to storage, tables, and how they are launched."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton import knobs

from ..recording import Launch, submit

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter: fixed by TRITON_INTERPRET when this module is loaded."""
_INTERPRETED = tl.constexpr(INTERPRETED)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """The kernel on a grid, or nothing where that is empty."""
    if all(grid):
        submit(Launch(kernel[grid], kernel.fn.__name__, grid, args, meta))


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``count`` and ``least``."""
    return 1 << (max(count, least) - 1).bit_length()


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """f32 to storage, to nearest, ties to even. The interpreter cuts bf16 off instead of rounding it."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(x == x, rounded, (bits >> 16) | 0x40)
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def put(pointer, x, mask):
    """Stores f32 values in the pointer's type."""
    tl.store(pointer, narrow(x, pointer.dtype.element_ty), mask=mask)


@triton.jit
def to_nearest(x):
    """The nearest whole number, ties to even, of |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def find_sequence(offsets, count, token):
    """The sequence whose tokens offsets[s]..offsets[s + 1] hold ``token``: the last s with offsets[s] <= token."""
    low = 0
    high = count
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(offsets + middle) <= token:
            low = middle
        else:
            high = middle
    return low
