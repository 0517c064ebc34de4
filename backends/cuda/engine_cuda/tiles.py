"""How kernels are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from .kernels.common import INTERPRETED, power_of_two


@dataclass(frozen=True)
class Tiles:
    """Rows of x, rows of the weight and columns of a program's step, and warps and stages."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


def of_matmul(rows: int, outputs: int, bytes_: int) -> Tiles:
    """``bytes_``: of a number in the product."""
    if INTERPRETED:  # each program costs the same, however large it is
        return Tiles(power_of_two(min(rows, 64), 16), power_of_two(min(outputs, 256), 16), 128, 4, 1)
    bm = power_of_two(min(rows, 128), 16)
    bn = 64 if bm <= 32 else 128
    return Tiles(bm, bn, 128 // bytes_, 8 if bm == 128 else 4, 3)


def dot_type(x: torch.dtype, weight: torch.dtype | None) -> tuple[tl.dtype, str]:
    """In what a product with a weight stored as ``weight`` (None: as codes) is taken, and how precisely.

    16-bit numbers of one type as they are; codes in the type of x; anything else as f32, in one pass of TF32 where x and
    weight lose little by it, or in three that lose nothing.
    """
    if INTERPRETED:
        return tl.float32, "ieee"
    if x == torch.float32:
        return tl.float32, "tf32x3"
    if weight is None or weight == x:
        return (tl.bfloat16 if x == torch.bfloat16 else tl.float16), "tf32"
    return tl.float32, "tf32"
