"""Products y = x W^T + bias + residual whose operands the GPU's copy engine brings tile by tile, by descriptors of their arrays:
it computes the addresses, leaves out what lies beyond an edge, and needs no registers, all of which then hold sums.

The weight is the left operand, as in ``matmul``. A program takes one tile after another, so that the reads of the next are on
their way while sums of the last are written.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .matmul import finish


@triton.jit
def _tile(tile, blocks, columns, BESIDE: tl.constexpr = 8):
    """The block of rows of x and that of outputs which a tile has. Tiles of BESIDE blocks of rows follow each other, so that they
    find what they share in the cache."""
    start = tile // (BESIDE * columns) * BESIDE
    count = tl.minimum(blocks - start, BESIDE)
    place = tile % (BESIDE * columns)
    return start + place % count, place // count


@triton.jit
def _call_for(matrix, row, outputs, depth, columns, ROWS: tl.constexpr):
    """Has the first columns of ROWS rows of a matrix brought to the cache that all multiprocessors share."""
    LINE: tl.constexpr = 128 // (matrix.dtype.element_ty.primitive_bitwidth // 8)
    rows = matrix + tl.minimum(row + tl.arange(0, ROWS), outputs - 1).to(tl.int64)[:, None] * depth
    lines = tl.arange(0, 4)[None, :] * LINE
    for column in range(0, columns, 4 * LINE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [rows + column + lines],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["rows"])
def tiled(
    x, weight, matrix, x_scale, scale, bias, residual, y, rows, outputs, depth, called, first, second,
    SCALED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, JOINED: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x [rows, depth] and weight [outputs, depth] as descriptors of tiles [BM, BK] and [BN, BK]. SCALED: both are of 8 bits, with
    a factor a row of each. Sums of int8 (DOT is i32) are exact; those of E4M3 have some 14 bits on the way. Grid: programs, as
    many as tiles or fewer. ``called``: columns of the weight's ``matrix`` that are called for while the kernel before it ends."""
    blocks, columns = tl.cdiv(rows, BM), tl.cdiv(outputs, BN)
    if EARLY:
        gdc_launch_dependents()
        _block, column = _tile(tl.program_id(0), blocks, columns)
        _call_for(matrix, column * BN, outputs, depth, called, BN)
        gdc_wait()
    for tile in tl.range(tl.program_id(0), blocks * columns, tl.num_programs(0), flatten=True):
        block, column = _tile(tile, blocks, columns)
        sums = tl.zeros([BN, BM], tl.int32 if tl.int32 == DOT else tl.float32)
        for k in range(0, depth, BK):
            a = weight.load([column * BN, k])
            b = x.load([block * BM, k])
            if SCALED:
                sums = tl.dot(a, tl.trans(b), sums, out_dtype=sums.dtype)
            else:
                sums = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), sums)
        m, n = block * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        there = m < rows
        result = sums.to(tl.float32)
        if SCALED:
            result *= tl.load(scale + n, mask=n < outputs, other=0).to(tl.float32)[:, None]
            result *= tl.load(x_scale + m, mask=there, other=0)[None, :]
        finish(result, bias, residual, y, m, there, n, outputs, 0, outputs, BIASED, ADDED, rows, first, second, JOINED)
