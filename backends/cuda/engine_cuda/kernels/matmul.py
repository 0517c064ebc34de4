"""Products with weights [N, K] in any packing: y = x W^T + bias + residual.

The weight is the left operand, so that its rows fill the large side of a matrix instruction where x has few rows. Rows of x may
be grouped by expert: ``order`` then holds, in blocks of BM, which of the T * k choices they are, -1 where a block is not full.
"""

import triton
import triton.language as tl

from .common import put


@triton.jit
def _rows_of(order, block, rows, GROUPED: tl.constexpr, BM: tl.constexpr):
    """The rows of y that a block makes, and which of them exist."""
    m = block * BM + tl.arange(0, BM)
    if GROUPED:
        m = tl.load(order + m)
        return m, m >= 0
    return m, m < rows


@triton.jit
def _finish(
    sums, bias, residual, y, m, row_there, n, outputs, batch,
    y_row, BIASED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """sums f32 [BN, BM], with bias and residual, into y [rows, ...] from column batch * outputs on."""
    there = (n < outputs)[:, None] & row_there[None, :]
    if BIASED:
        sums += tl.load(bias + n, mask=n < outputs, other=0).to(tl.float32)[:, None]
    place = m.to(tl.int64)[None, :] * y_row + batch * outputs + n[:, None]
    if ADDED:
        sums += tl.load(residual + place, mask=there, other=0).to(tl.float32)
    put(y + place, sums, there)


@triton.jit
def dense(
    x, weight, bias, residual, y, order, experts, rows, outputs, depth, x_row, y_row, choices,
    BIASED: tl.constexpr, ADDED: tl.constexpr, GROUPED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The weight as it is stored. The grid's third axis counts heads, each with a matrix and columns of its own."""
    batch = tl.program_id(2)
    expert = batch.to(tl.int64)
    if GROUPED:
        expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
        if expert < 0:
            return
    m, there = _rows_of(order, tl.program_id(0), rows, GROUPED, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_rows = x + (m // choices).to(tl.int64)[:, None] * x_row + batch * depth
    w_rows = weight + (expert * outputs + n.to(tl.int64))[:, None] * depth
    sums = tl.zeros([BN, BM], tl.float32)
    for first in range(0, depth, BK):
        columns = first + k
        inside = (columns < depth)[None, :]
        a = tl.load(w_rows + columns[None, :], mask=(n < outputs)[:, None] & inside, other=0)
        b = tl.load(x_rows + columns[None, :], mask=there[:, None] & inside, other=0)
        sums = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), sums, input_precision=PRECISION)
    _finish(sums, bias + expert * outputs, residual, y, m, there, n, outputs, batch, y_row, BIASED, ADDED)


@triton.jit
def _scales(pointer, fine, rows, there, column, groups, supers, GROUP: tl.constexpr, SUPER: tl.constexpr,
            FINE: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The factors of 32 columns from ``column`` on, f32 [BN, 32] or [BN, 1]: one for each SUPER columns, times an integer
    for each GROUP where FINE says so."""
    if GROUP >= 32:
        value = tl.load(pointer + rows * supers + column // SUPER, mask=there, other=0).to(tl.float32)
        if FINE:
            value *= tl.load(fine + rows * groups + column // GROUP, mask=there, other=0).to(tl.float32)
        return value[:, None]
    else:
        halves = tl.arange(0, 2)[None, :]
        value = tl.load(pointer + rows * supers + column // SUPER, mask=there, other=0).to(tl.float32)[:, None]
        value = value * tl.load(
            fine + rows[:, None] * groups + column // GROUP + halves, mask=there[:, None], other=0
        ).to(tl.float32)
        return tl.reshape(tl.broadcast_to(value[:, :, None], [BN, 2, 16]), [BN, 32])


@triton.jit
def decoded(
    codes, table, scale, fine_scale, least, fine_least, rows, there, column, groups, supers,
    TABLE: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    FINE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Codes [BN, 32] of the columns from ``column`` on as f32 numbers: (code - ZERO) * scale - least, or table[code] *
    scale."""
    if TABLE:
        numbers = tl.load(table + codes.to(tl.int32))
    else:
        numbers = codes.to(tl.float32) - ZERO
    numbers = numbers * _scales(scale, fine_scale, rows, there, column, groups, supers, GROUP, SUPER, FINE, BN)
    if LEAST:
        numbers -= _scales(least, fine_least, rows, there, column, groups, supers, GROUP, SUPER, FINE, BN)
    return numbers


@triton.jit
def quantized(
    x, codes, table, scale, fine_scale, least, fine_least, bias, residual, y, order, experts,
    rows, outputs, depth, code_row, groups, supers, x_row, y_row, choices,
    BITS: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr,
    SUPER: tl.constexpr, FINE: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, GROUPED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The weight as codes of 4 or 8 bits with factors of groups of columns, decoded in registers. A byte of 4-bit codes holds
    columns 64 i + j, low, and 64 i + 32 + j, so that each nibble of 32 bytes is a run of columns."""
    batch = tl.program_id(2)
    expert = batch.to(tl.int64)
    if GROUPED:
        expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
        if expert < 0:
            return
    m, row_there = _rows_of(order, tl.program_id(0), rows, GROUPED, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    there = n < outputs
    w_rows = expert * outputs + n.to(tl.int64)
    x_rows = x + (m // choices).to(tl.int64)[:, None] * x_row + batch * depth
    k = tl.arange(0, 32)
    sums = tl.zeros([BN, BM], tl.float32)
    for byte in range(0, code_row, 32):
        packed = tl.load(codes + w_rows[:, None] * code_row + byte + k[None, :], mask=there[:, None], other=0)
        for part in tl.static_range(8 // BITS):
            column = byte * (8 // BITS) + 32 * part
            if column < depth:
                taken = packed
                if BITS == 4:
                    taken = (packed >> (4 * part)) & 15
                a = decoded(
                    taken, table, scale, fine_scale, least, fine_least, w_rows, there, column, groups, supers,
                    TABLE, ZERO, LEAST, GROUP, SUPER, FINE, BN,
                )  # fmt: skip
                inside = row_there[:, None] & (column + k < depth)[None, :]
                b = tl.load(x_rows + (column + k)[None, :], mask=inside, other=0)
                sums = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), sums, input_precision=PRECISION)
    _finish(sums, bias + expert * outputs, residual, y, m, row_there, n, outputs, batch, y_row, BIASED, ADDED)


@triton.jit
def bytes_by_bytes(
    x, x_scale, weight, scale, bias, residual, y, rows, outputs, depth,
    BIASED: tl.constexpr, ADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """int8 by int8: a factor a row of x and one a row of the weight. Sums in i32 are exact, in whatever order."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    there = m < rows
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_rows = x + m.to(tl.int64)[:, None] * depth
    w_rows = weight + n.to(tl.int64)[:, None] * depth
    sums = tl.zeros([BN, BM], tl.int32)
    for first in range(0, depth, BK):
        inside = (first + k < depth)[None, :]
        a = tl.load(w_rows + (first + k)[None, :], mask=(n < outputs)[:, None] & inside, other=0)
        b = tl.load(x_rows + (first + k)[None, :], mask=there[:, None] & inside, other=0)
        sums = tl.dot(a, tl.trans(b), sums, out_dtype=tl.int32)
    factors = tl.load(scale + n, mask=n < outputs, other=0).to(tl.float32)[:, None]
    factors = factors * tl.load(x_scale + m, mask=there, other=0)[None, :]
    _finish(sums.to(tl.float32) * factors, bias, residual, y, m, there, n, outputs, 0, outputs, BIASED, ADDED)


@triton.jit
def fp8_by_fp8(
    x, x_scale, weight, scale, bias, residual, y, rows, outputs, depth, groups,
    BIASED: tl.constexpr, ADDED: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """E4M3 by E4M3: a factor a row of x, and of the weight one a row (WHOLE) or one for each BK columns. Sums of more than BK
    products are taken in f32, which matrix units do not."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    there = m < rows
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_rows = x + m.to(tl.int64)[:, None] * depth
    w_rows = weight + n.to(tl.int64)[:, None] * depth
    w_scales = scale + n.to(tl.int64) * groups
    sums = tl.zeros([BN, BM], tl.float32)
    for first in range(0, depth, BK):
        inside = (first + k < depth)[None, :]
        a = tl.load(w_rows + (first + k)[None, :], mask=(n < outputs)[:, None] & inside, other=0)
        b = tl.load(x_rows + (first + k)[None, :], mask=there[:, None] & inside, other=0)
        a = a.to(tl.float8e4nv, bitcast=True)
        b = tl.trans(b.to(tl.float8e4nv, bitcast=True))
        part = tl.dot(a, b)
        if not WHOLE:
            part *= tl.load(w_scales + first // BK, mask=n < outputs, other=0)[:, None]
        sums += part
    if WHOLE:
        sums *= tl.load(w_scales, mask=n < outputs, other=0)[:, None]
    sums *= tl.load(x_scale + m, mask=there, other=0)[None, :]
    _finish(sums, bias, residual, y, m, there, n, outputs, 0, outputs, BIASED, ADDED)


@triton.jit
def embed_dense(ids, weight, y, width, scale, BLOCK: tl.constexpr):
    """A part of a token's row a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = columns < width
    row = tl.load(ids + token).to(tl.int64)
    values = tl.load(weight + row * width + columns, mask=kept, other=0).to(tl.float32)
    put(y + token * width + columns, values * scale, kept)


@triton.jit
def embed_quantized(
    ids, codes, table, scale, fine_scale, least, fine_least, y, width, code_row, groups, supers, factor,
    BITS: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr,
    SUPER: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """32 columns of a token's row a program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * 32
    k = tl.arange(0, 32)[None, :]
    rows = tl.load(ids + token).to(tl.int64) + tl.zeros([1], tl.int64)
    there = rows >= 0
    if BITS == 4:
        packed = tl.load(codes + rows[:, None] * code_row + column // 64 * 32 + k)
        taken = (packed >> (column % 64 // 8)) & 15
    else:
        taken = tl.load(codes + rows[:, None] * code_row + column + k)
    numbers = decoded(
        taken, table, scale, fine_scale, least, fine_least, rows, there, column, groups, supers,
        TABLE, ZERO, LEAST, GROUP, SUPER, FINE, 1,
    )  # fmt: skip
    put(y + token * width + column + k, numbers * factor, column + k < width)
