"""What the kernels share: rounding to storage, tables, and how they are launched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..recording import Launch, submit

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter: fixed by TRITON_INTERPRET when this module is loaded."""
_INTERPRETED = tl.constexpr(INTERPRETED)
OPTIONS = {"enable_fp_fusion": True}
"""What every kernel is compiled with. Triton changes its own choice after 3.9, and with it the last bits of sums."""


class _Thread(threading.local):
    compiles = False


_thread = _Thread()


@contextmanager
def only_compiled() -> Iterator[None]:
    """Within it this thread's launches compile their kernels, and run nothing."""
    _thread.compiles = True
    try:
        yield
    finally:
        _thread.compiles = False


@cache
def begins_early() -> bool:
    """Whether a kernel's programs begin while the kernel before it ends: NVIDIA's GPUs from Hopper on do that."""
    nvidia = torch.version.hip is None and torch.cuda.is_available()
    return not INTERPRETED and nvidia and torch.cuda.get_device_capability() >= (9, 0)


def early(begins: bool) -> dict[str, bool]:
    """How kernels with ``enter`` are launched."""
    return {"EARLY": True, "launch_pdl": True} if begins else {"EARLY": False}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """The kernel on a grid, or nothing where that is empty."""
    if "EARLY" in kernel.arg_names:
        meta |= early(begins_early())
    if _thread.compiles:
        kernel.warmup(*args, grid=grid, **meta, **OPTIONS)
    elif all(grid):
        submit(Launch(kernel[grid], kernel.fn.__name__, grid, args, meta | OPTIONS))


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``count`` and ``least``."""
    return 1 << (max(count, least) - 1).bit_length()


@triton.jit
def enter(EARLY: tl.constexpr):
    """Lets the programs of the next kernel begin, and waits for the kernel before to end, where programs may begin earlier. Each
    program of a kernel with EARLY calls it once, before it touches what others write, so that all kernels before the last one
    have ended, too."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


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
    """Stores f32 values in the pointer's type; bytes are E4M3."""
    if pointer.dtype.element_ty == tl.uint8:
        tl.store(pointer, to_e4m3(x), mask=mask)
    else:
        tl.store(pointer, narrow(x, pointer.dtype.element_ty), mask=mask)


@triton.jit
def to_e4m3(x):
    """f32 to the bytes of E4M3, to nearest, ties to even: saturated at 448, NaN where x is not finite."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    exponent = tl.maximum((size >> 23).to(tl.int32), 121)  # of a float32, no less than that of 2^-6
    one = ((257 - exponent).to(tl.uint32) << 23).to(tl.float32, bitcast=True)  # what makes whole numbers of the steps
    steps = to_nearest(tl.where(size < 0x7F800000, tl.abs(x), 0.0) * one).to(tl.int32)
    codes = tl.minimum((exponent - 121) * 8 + steps, 0x7E) | ((bits >> 24) & 0x80).to(tl.int32)
    return tl.where(size < 0x7F800000, codes, 0x7F).to(tl.uint8)


@triton.jit
def from_e4m3(codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """The bytes of E4M3 as ``dtype``, exactly. NATIVE: by the GPU's own instruction, which not every one has."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        wide = codes.to(tl.uint16)
        # Moved to where float16 has its exponent and the rest, a number is 2^-8 of itself.
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0).to(dtype)


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
