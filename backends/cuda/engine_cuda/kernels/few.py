"""Products of few rows with codes of four bits, for NVIDIA's matrix instructions.

Memory is what takes the time of such products, as long as a weight costs no more than some three instructions. So codes become
operands in the registers of the lane that multiplies them, two in one instruction (they are or-ed below the bits of 128, or in
f16 of 1,024, whose ulp is one), and factors are applied to the sums of a group of columns. Each warp has groups of its own.
"""

import triton
import triton.language as tl

from .common import _INTERPRETED
from .matmul import finish, rows_of

GROUP = tl.constexpr(32)


@triton.jit
def _pairs(words, SHIFT: tl.constexpr, HALF: tl.constexpr):
    """Of each of the nibbles SHIFT // 4 and SHIFT // 4 + 4 a number that is larger by what HALF is begun with, [..., 2]."""
    shifted = words >> SHIFT
    if _INTERPRETED:
        bits = (shifted & 0x000F000F) | 0x43004300
    elif tl.float16 == HALF:  # one instruction, of which the compiler of Triton 3.6 makes two
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;", "=r,r", [shifted], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;", "=r,r", [shifted], dtype=tl.uint32, is_pure=True, pack=1
        )
    low = bits.to(tl.uint16).to(HALF, bitcast=True)
    return tl.join(low, (bits >> 16).to(tl.uint16).to(HALF, bitcast=True))


@triton.jit
def _spread(words, TOGETHER: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[GROUPS, ROWS, 32] of words [ROWS, 4 GROUPS] as ``repack.packed_codes`` has them. In this order of steps all of it stays in
    its lane, for the compiler carries the layout of an operand through them to where words are read."""
    words = tl.permute(tl.reshape(words, [ROWS, GROUPS, 4]), (2, 1, 0))
    low = tl.join(_pairs(words, 0, HALF), _pairs(words, 4, HALF))
    high = tl.join(_pairs(words, 8, HALF), _pairs(words, 12, HALF))
    numbers = tl.join(low, high)  # lane, group, row, next, pair, hi
    numbers = tl.permute(numbers, (5, 0, 4, 3, 1, 2) if TOGETHER == 4 else (5, 4, 0, 3, 1, 2))
    return tl.permute(tl.reshape(numbers, [32, GROUPS, ROWS]), (1, 2, 0))


@triton.jit
def _read(pointer, n, there, group, count, SPAN: tl.constexpr):
    """What every SPAN groups have, [groups, outputs]: 0 beyond the last."""
    place = group // SPAN
    return tl.load(
        pointer + n[None, :] * count + place[:, None], mask=there[None, :] & (place < count)[:, None], other=0
    )


@triton.jit
def _read_factors(pointer, fine, n, there, group, supers, groups, SUPER: tl.constexpr, FINE: tl.constexpr):
    value = _read(pointer, n, there, group, supers, SUPER // GROUP)
    return value, _read(fine, n, there, group, groups, 1) if FINE else value


@triton.jit
def _factor(value, fine, FINE: tl.constexpr):
    return value.to(tl.float32) * fine.to(tl.float32) if FINE else value.to(tl.float32)


@triton.jit
def few_nibbles(
    x, codes, scale, fine_scale, least, fine_least, bias, residual, y, order, experts,
    rows, outputs, depth, first, second, part, code_row, groups, supers, x_row, y_row, choices,
    TOGETHER: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr, SUPER: tl.constexpr, FINE: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, JOINED: tl.constexpr, GROUPED: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As ``matmul.quantized``, of groups of 32 columns. BK is 32 for each warp; ``part`` is of whole BK."""
    HALF: tl.constexpr = tl.float16 if tl.float16 == DOT else tl.bfloat16
    BEGUN: tl.constexpr = 1024 if tl.float16 == DOT else 128
    STEP: tl.constexpr = BK // GROUP
    expert = tl.cast(0, tl.int64)
    if GROUPED:
        expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
        if expert < 0:
            return
    m, row_there = rows_of(order, tl.program_id(0), rows, GROUPED, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    there = n < outputs
    words = codes.to(tl.pointer_type(tl.uint32), bitcast=True)
    words += (expert * outputs + tl.minimum(n, outputs - 1).to(tl.int64))[:, None] * (code_row // 4)
    x_rows = x + (m // choices).to(tl.int64)[:, None] * x_row
    k = tl.arange(0, BK)
    word = tl.arange(0, BK // 8)
    scale, least = scale + expert * outputs * supers, least + expert * outputs * supers
    fine_scale, fine_least = fine_scale + expert * outputs * groups, fine_least + expert * outputs * groups
    begin = tl.program_id(2) * part if PARTS else 0
    group = begin // GROUP + tl.arange(0, STEP)
    scales, fine_scales = _read_factors(scale, fine_scale, n, there, group, supers, groups, SUPER, FINE)
    leasts, fine_leasts = scales, fine_scales
    if LEAST:
        leasts, fine_leasts = _read_factors(least, fine_least, n, there, group, supers, groups, SUPER, FINE)
    ones = tl.full([STEP, 16, GROUP // 2], 1.0, DOT)
    ones = tl.reshape(tl.join(ones, ones), [STEP, 16, GROUP])  # a join, or this product's operands lie otherwise
    sums = tl.zeros([STEP, BN, BM], tl.float32)
    for column in range(begin, tl.minimum(begin + part, depth), BK):
        a = _spread(tl.load(words + (column // 8 + word)[None, :]), TOGETHER, HALF, BN, STEP)
        columns = (column + k)[None, :]
        b = tl.load(x_rows + columns, mask=row_there[:, None] & (columns < depth), other=0)
        b = tl.permute(tl.reshape(b, [BM, STEP, GROUP]), (1, 2, 0)).to(DOT)
        # The sums of x, by a product, since its result lies as that of the other one, which begins with what is too much.
        totals = tl.dot(ones, b, input_precision=PRECISION)
        totals = tl.reshape(tl.broadcast_to(totals[:, None, :, :], [STEP, BN // 16, 16, BM]), [STEP, BN, BM])
        products = tl.dot(a.to(DOT), b, totals * (-BEGUN - ZERO), input_precision=PRECISION)
        by, less = _factor(scales, fine_scales, FINE), _factor(leasts, fine_leasts, FINE)
        group += STEP
        # A step before they are needed, which else waits for memory.
        scales, fine_scales = _read_factors(scale, fine_scale, n, there, group, supers, groups, SUPER, FINE)
        if LEAST:
            leasts, fine_leasts = _read_factors(least, fine_least, n, there, group, supers, groups, SUPER, FINE)
        sums += products * by[:, :, None]
        if LEAST:
            sums -= totals * less[:, :, None]
    if PARTS:
        y += tl.program_id(2).to(tl.int64) * rows * outputs
    finish(
        tl.sum(sums, 0), bias + expert * outputs, residual, y, m, row_there, n, outputs, 0, y_row, BIASED, ADDED,
        rows, first, second, JOINED,
    )  # fmt: skip
