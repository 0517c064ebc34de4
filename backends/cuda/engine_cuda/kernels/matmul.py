"""Products with weights [N, K] in any packing: y = x W^T + bias + residual.

The weight is the left operand, so that its rows fill the large side of a matrix instruction where x has few rows. Rows of x may
be grouped by expert: ``order`` then holds, in blocks of BM, which of the T * k choices they are, -1 where a block is not full.
"""

import triton
import triton.language as tl

from .common import from_e4m3, put

ENDED = tl.constexpr(4096)
"""Sums of a program to which a residual is added at a time."""


@triton.jit
def rows_of(order, block, rows, GROUPED: tl.constexpr, BM: tl.constexpr):
    """The rows of y that a block makes, and which of them exist."""
    m = block * BM + tl.arange(0, BM)
    if GROUPED:
        m = tl.load(order + m)
        return m, m >= 0
    return m, m < rows


@triton.jit
def _place(m, n, rows, outputs, first, second):
    """Where an output of a row is, of up to three matrices beside each other that have a y each, one y after the other. ``first``
    and ``second``: the outputs of those."""
    behind = first + second
    start = tl.where(n < first, 0, tl.where(n < behind, first, behind))
    width = tl.where(n < first, first, tl.where(n < behind, second, outputs - behind))
    return start.to(tl.int64) * rows + m.to(tl.int64) * width + (n - start)


@triton.jit
def finish(
    sums, bias, residual, y, m, row_there, n, outputs, batch,
    y_row, BIASED: tl.constexpr, ADDED: tl.constexpr, rows=0, first=0, second=0, JOINED: tl.constexpr = False,
):  # fmt: skip
    """sums f32 [BN, BM], with bias and residual, into y [rows, ...] from column batch * outputs on, or where matrices are JOINED
    into a y of each."""
    if BIASED:
        sums += tl.load(bias + n, mask=n < outputs, other=0).to(tl.float32)[:, None]
    m = tl.where(row_there, m, -1)
    _put_sums(
        sums, residual, y, m, n, outputs, batch, y_row, rows, first, second, ADDED, JOINED, sums.shape[0], sums.shape[1]
    )


@triton.jit
def _put_sums(
    sums, residual, y, m, n, outputs, batch, y_row, rows, first, second,
    ADDED: tl.constexpr, JOINED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """m: -1 where there is no row. A few rows at a time where there is a residual: all of it would take as many registers as the
    sums, and with them the place of a second program on a multiprocessor."""
    if ADDED and BN * BM > ENDED:
        HALF: tl.constexpr = BM // 2
        low, high = _halves(sums, BN, BM)
        low_m, high_m = _halves(m[None, :], 1, BM)
        low_m, high_m = tl.reshape(low_m, [HALF]), tl.reshape(high_m, [HALF])
        _put_sums(low, residual, y, low_m, n, outputs, batch, y_row, rows, first, second, ADDED, JOINED, BN, HALF)
        _put_sums(high, residual, y, high_m, n, outputs, batch, y_row, rows, first, second, ADDED, JOINED, BN, HALF)
    else:
        there = (n < outputs)[:, None] & (m >= 0)[None, :]
        if JOINED:
            place = _place(m[None, :], n[:, None], rows, outputs, first, second)
        else:
            place = m.to(tl.int64)[None, :] * y_row + batch * outputs + n[:, None]
        if ADDED:
            sums += tl.load(residual + place, mask=there, other=0).to(tl.float32)
        put(y + place, sums, there)


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first columns of x [ROWS, COLUMNS], and the others."""
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


@triton.jit(do_not_specialize=["rows"])
def dense(
    x, weight, bias, residual, y, order, experts, rows, outputs, depth, first, second, x_row, y_row, choices,
    BIASED: tl.constexpr, ADDED: tl.constexpr, JOINED: tl.constexpr, GROUPED: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The weight as it is stored. The grid's third axis counts heads, each with a matrix and columns of its own."""
    batch = tl.program_id(2)
    expert = batch.to(tl.int64)
    if GROUPED:
        expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
        if expert < 0:
            return
    m, there = rows_of(order, tl.program_id(0), rows, GROUPED, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_rows = x + (m // choices).to(tl.int64)[:, None] * x_row + batch * depth
    w_rows = weight + (expert * outputs + n.to(tl.int64))[:, None] * depth
    sums = tl.zeros([BN, BM], tl.float32)
    for column in range(0, depth, BK):
        columns = column + k
        inside = (columns < depth)[None, :]
        a = tl.load(w_rows + columns[None, :], mask=(n < outputs)[:, None] & inside, other=0)
        b = tl.load(x_rows + columns[None, :], mask=there[:, None] & inside, other=0)
        sums = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), sums, input_precision=PRECISION)
    finish(
        sums, bias + expert * outputs, residual, y, m, there, n, outputs, batch, y_row, BIASED, ADDED,
        rows, first, second, JOINED,
    )  # fmt: skip


@triton.jit
def _spread(values, ROWS: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr):
    """[ROWS, COUNT], each EACH times: [ROWS, COUNT * EACH]."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], [ROWS, COUNT, EACH]), [ROWS, COUNT * EACH])


@triton.jit
def _of_groups(pointer, rows, there, first, groups, TOGETHER: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr):
    """What the COUNT groups of columns from ``first`` on have, [ROWS, COUNT]: 0 beyond the last."""
    group = first // GROUP + tl.arange(0, COUNT)
    if TOGETHER == 0:
        mask = there[:, None] & (group < groups)[None, :]
        return tl.load(pointer + rows[:, None] * groups + group[None, :], mask=mask, other=0)
    else:  # as repack.tiled has them; read so that threads with a row's groups are neighbours, as those with its codes are
        group, rows = group[:, None], rows[None, :]
        place = (rows // 32 * groups + group) * 32 + rows % 8 * 4 + rows % 32 // 8
        return tl.trans(tl.load(pointer + place, mask=there[None, :] & (group < groups), other=0))


@triton.jit
def _read_factors(pointer, fine, rows, there, first, groups, supers, TOGETHER: tl.constexpr, GROUP: tl.constexpr,
                  SUPER: tl.constexpr, FINE: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Of COLUMNS columns from ``first`` on what each SUPER have, and where FINE says so the integer that each GROUP have."""
    supers_count: tl.constexpr = COLUMNS // SUPER if COLUMNS > SUPER else 1
    groups_count: tl.constexpr = COLUMNS // GROUP if COLUMNS > GROUP else 1
    value = _of_groups(pointer, rows, there, first, supers, TOGETHER, SUPER, supers_count)
    if FINE:
        return value, _of_groups(fine, rows, there, first, groups, TOGETHER, GROUP, groups_count)
    else:
        return value, tl.zeros([1, 1], tl.int8)


@triton.jit
def _factors(value, fine, GROUP: tl.constexpr, SUPER: tl.constexpr, FINE: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    """The factors of COLUMNS columns, f32 [ROWS, COLUMNS], of what ``_read_factors`` has read."""
    SUPERS: tl.constexpr = COLUMNS // SUPER if COLUMNS > SUPER else 1
    value = value.to(tl.float32)
    if FINE:
        GROUPS: tl.constexpr = COLUMNS // GROUP if COLUMNS > GROUP else 1
        value = _spread(value, ROWS, SUPERS, GROUPS // SUPERS) * fine.to(tl.float32)
        return _spread(value, ROWS, GROUPS, COLUMNS // GROUPS)
    else:
        return _spread(value, ROWS, SUPERS, COLUMNS // SUPERS)


@triton.jit
def _chosen(index, TABLE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """32 bits of an integer: those at FIRST + index, an index below COUNT."""
    if COUNT == 1:
        return tl.full([1, 1], (TABLE >> (32 * FIRST)) & 0xFFFFFFFF, tl.uint32)
    else:
        HALF: tl.constexpr = COUNT // 2
        low, high = _chosen(index, TABLE, FIRST, HALF), _chosen(index, TABLE, FIRST + HALF, HALF)
        return tl.where((index & HALF) == 0, low, high)


@triton.jit
def meant(codes, MEANING: tl.constexpr, TABLE: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers that codes stand for, f32. The sixteen of a table are constants of the kernel, int8 or f32: codes with which
    memory is read would not be read ahead themselves."""
    if MEANING == "e4m3":
        return from_e4m3(codes, tl.float32, NATIVE)
    elif MEANING == "bytes":
        word = _chosen(codes >> 2, TABLE, 0, 4)
        return (word >> ((codes & 3) * 8).to(tl.uint32)).to(tl.int8).to(tl.float32)
    elif MEANING == "numbers":
        return _chosen(codes, TABLE, 0, 16).to(tl.float32, bitcast=True)
    else:
        return codes.to(tl.float32)


@triton.jit
def decoded(
    codes, scale, fine_scale, least, fine_least,
    MEANING: tl.constexpr, TABLE: tl.constexpr, NATIVE: tl.constexpr, ZERO: tl.constexpr, LEAST: tl.constexpr,
    GROUP: tl.constexpr, SUPER: tl.constexpr, FINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes [ROWS, COLUMNS] as f32 numbers: (what a code means - ZERO) * scale - least, by factors as they were read; 0 beyond
    the last group."""
    numbers = meant(codes, MEANING, TABLE, NATIVE) - ZERO
    numbers *= _factors(scale, fine_scale, GROUP, SUPER, FINE, ROWS, COLUMNS)
    if LEAST:
        numbers -= _factors(least, fine_least, GROUP, SUPER, FINE, ROWS, COLUMNS)
    return numbers


@triton.jit
def _nibbles(packed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes [ROWS, COLUMNS] of bytes of rows as ``repack.packed_codes`` has them."""
    both = tl.reshape(tl.join(packed & 15, packed >> 4), [ROWS, COLUMNS // 64, 32, 2])
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [ROWS, COLUMNS])


@triton.jit
def _untiled(packed, BITS: tl.constexpr, TOGETHER: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    """Codes [TILES * ROWS, COLUMNS] of bytes of tiles, likewise, of which ROWS is 16, or 1 where there are those of one row."""
    EIGHT: tl.constexpr = 8 if ROWS == 16 else 1
    TWO: tl.constexpr = 2 if ROWS == 16 else 1
    if BITS == 4:
        packed = tl.join(packed & 15, packed >> 4)
    codes = tl.reshape(packed, [TILES, COLUMNS // 32, EIGHT, 4, TWO, 2, 2, 2])
    if BITS == 4:  # row, lane, 8 rows, next, hi, pair
        codes = tl.permute(codes, (0, 4, 2, 1, 6, 3, 7, 5) if TOGETHER == 4 else (0, 4, 2, 1, 6, 7, 3, 5))
    else:  # row, lane, 8 rows, hi, next, pair
        codes = tl.permute(codes, (0, 4, 2, 1, 5, 3, 7, 6) if TOGETHER == 4 else (0, 4, 2, 1, 5, 7, 3, 6))
    return tl.reshape(codes, [TILES * ROWS, COLUMNS])


@triton.jit(do_not_specialize=["rows"])
def quantized(
    x, codes, scale, fine_scale, least, fine_least, bias, residual, y, order, experts,
    rows, outputs, depth, first, second, part, code_row, groups, supers, x_row, y_row, choices,
    BITS: tl.constexpr, TOGETHER: tl.constexpr, MEANING: tl.constexpr, TABLE: tl.constexpr, NATIVE: tl.constexpr,
    ZERO: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, FINE: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, JOINED: tl.constexpr, GROUPED: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The weight as codes of 4 or 8 bits with factors of groups of columns, decoded in registers. With PARTS the grid's third
    axis is of parts, ``part`` columns each, and what these sum up to goes to y, f32 [parts, rows, outputs]."""
    batch = 0 if PARTS else tl.program_id(2)
    expert = tl.cast(batch, tl.int64)
    if GROUPED:
        expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
        if expert < 0:
            return
    m, row_there = rows_of(order, tl.program_id(0), rows, GROUPED, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    there = n < outputs
    x_rows = x + (m // choices).to(tl.int64)[:, None] * x_row + batch * depth
    k = tl.arange(0, BK)
    HEIGHT: tl.constexpr = 16 if TOGETHER else 1  # rows that lie together
    bytes_ = tl.arange(0, HEIGHT * BK * BITS // 8)
    tiles = (outputs + 31) // 32 * 2 if TOGETHER else outputs
    tile = tl.program_id(1) * (BN // HEIGHT) + tl.arange(0, BN // HEIGHT)
    tile_there = (tile < tiles)[:, None]
    code_rows = codes + (expert * tiles + tile.to(tl.int64))[:, None] * code_row
    sums = tl.zeros([BN, BM], tl.float32)
    begin = tl.program_id(2) * part if PARTS else 0
    # Factors are read a step before they are needed, which else waits for memory each time, and by 32-bit offsets.
    before = expert * tiles * HEIGHT
    scale, least = scale + before * supers, least + before * supers
    fine_scale, fine_least = fine_scale + before * groups, fine_least + before * groups
    scales, fine_scales = _read_factors(
        scale, fine_scale, n, there, begin, groups, supers, TOGETHER, GROUP, SUPER, FINE, BK
    )
    leasts, fine_leasts = scales, fine_scales
    if LEAST:
        leasts, fine_leasts = _read_factors(
            least, fine_least, n, there, begin, groups, supers, TOGETHER, GROUP, SUPER, FINE, BK
        )
    for column in range(begin, tl.minimum(begin + part, depth), BK):  # without a branch, or nothing of it is read ahead
        byte = (column * BITS // 8 * HEIGHT + bytes_)[None, :]
        taken = tl.load(code_rows + byte, mask=tile_there & (byte < code_row), other=0)
        if TOGETHER:
            taken = _untiled(taken, BITS, TOGETHER, BN // 16, 16, BK)
        elif BITS == 4:
            taken = _nibbles(taken, BN, BK)
        a = decoded(
            taken, scales, fine_scales, leasts, fine_leasts,
            MEANING, TABLE, NATIVE, ZERO, LEAST, GROUP, SUPER, FINE, BN, BK,
        )  # fmt: skip
        following = column + BK
        scales, fine_scales = _read_factors(
            scale, fine_scale, n, there, following, groups, supers, TOGETHER, GROUP, SUPER, FINE, BK
        )
        if LEAST:
            leasts, fine_leasts = _read_factors(
                least, fine_least, n, there, following, groups, supers, TOGETHER, GROUP, SUPER, FINE, BK
            )
        columns = (column + k)[None, :]
        b = tl.load(x_rows + columns, mask=row_there[:, None] & (columns < depth), other=0)
        sums = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), sums, input_precision=PRECISION)
    if PARTS:
        y += tl.program_id(2).to(tl.int64) * rows * outputs
    finish(
        sums, bias + expert * outputs, residual, y, m, row_there, n, outputs, batch, y_row, BIASED, ADDED,
        rows, first, second, JOINED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def sum_parts(
    parts, bias, residual, y, rows, outputs, first, second,
    PARTS: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, JOINED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y [rows, outputs] of f32 [PARTS, rows, outputs], in their order, with bias and residual; a y of each matrix where these
    are JOINED."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < outputs
    row = tl.program_id(0)
    place = row.to(tl.int64) * outputs + n
    sums = tl.load(parts + place, mask=there, other=0)
    for part in tl.static_range(1, PARTS):
        sums += tl.load(parts + part * rows * outputs + place, mask=there, other=0)
    if BIASED:
        sums += tl.load(bias + n, mask=there, other=0).to(tl.float32)
    if ADDED:
        sums += tl.load(residual + place, mask=there, other=0).to(tl.float32)
    if JOINED:
        place = _place(row, n, rows, outputs, first, second)
    put(y + place, sums, there)


@triton.jit(do_not_specialize=["rows"])
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
    finish(sums.to(tl.float32) * factors, bias, residual, y, m, there, n, outputs, 0, outputs, BIASED, ADDED)


@triton.jit(do_not_specialize=["rows"])
def fp8_by_fp8(
    x, x_scale, weight, scale, bias, residual, y, rows, outputs, depth, groups,
    BIASED: tl.constexpr, ADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """E4M3 by E4M3: a factor a row of x, and of the weight one for each BK columns."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    there = m < rows
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Read as what they are: bytes that are cast then go through registers and shared memory once more.
    x_rows = x.to(tl.pointer_type(tl.float8e4nv), bitcast=True) + m.to(tl.int64)[:, None] * depth
    w_rows = weight.to(tl.pointer_type(tl.float8e4nv), bitcast=True) + n.to(tl.int64)[:, None] * depth
    w_scales = scale + n.to(tl.int64) * groups
    sums = tl.zeros([BN, BM], tl.float32)
    following = tl.load(w_scales, mask=n < outputs, other=0)
    for first in range(0, depth, BK):
        inside = (first + k < depth)[None, :]
        a = tl.load(w_rows + (first + k)[None, :], mask=(n < outputs)[:, None] & inside, other=0.0)
        b = tl.load(x_rows + (first + k)[None, :], mask=there[:, None] & inside, other=0.0)
        sums += tl.dot(a, tl.trans(b)) * following[:, None]
        # A step before it is needed, or each waits for memory once more.
        following = tl.load(w_scales + tl.minimum(first // BK + 1, groups - 1), mask=n < outputs, other=0)
    sums *= tl.load(x_scale + m, mask=there, other=0)[None, :]
    finish(sums, bias, residual, y, m, there, n, outputs, 0, outputs, BIASED, ADDED)


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
    ids, codes, scale, fine_scale, least, fine_least, y, width, code_row, groups, supers, factor,
    BITS: tl.constexpr, TOGETHER: tl.constexpr, MEANING: tl.constexpr, TABLE: tl.constexpr, NATIVE: tl.constexpr,
    ZERO: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """32 columns of a token's row a program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * 32
    k = tl.arange(0, 32)[None, :]
    rows = tl.load(ids + token).to(tl.int64) + tl.zeros([1], tl.int64)
    there = rows >= 0
    if TOGETHER:
        byte, row = tl.arange(0, BITS * 4)[None, :], rows[:, None] % 16
        place = row % 8 * 8 * BITS + byte // BITS * 2 * BITS + row // 8 * BITS + byte % BITS
        at = codes + rows[:, None] // 16 * code_row + column * BITS * 2
        taken = _untiled(tl.load(at + place), BITS, TOGETHER, 1, 1, 32)
    elif BITS == 4:
        packed = tl.load(codes + rows[:, None] * code_row + column // 64 * 32 + k)
        taken = (packed >> (column % 64 // 8)) & 15
    else:
        taken = tl.load(codes + rows[:, None] * code_row + column + k)
    scales, fine_scales = _read_factors(
        scale, fine_scale, rows, there, column, groups, supers, TOGETHER, GROUP, SUPER, FINE, 32
    )
    leasts, fine_leasts = _read_factors(
        least, fine_least, rows, there, column, groups, supers, TOGETHER, GROUP, SUPER, FINE, 32
    )
    numbers = decoded(
        taken, scales, fine_scales, leasts, fine_leasts,
        MEANING, TABLE, NATIVE, ZERO, LEAST, GROUP, SUPER, FINE, 1, 32,
    )  # fmt: skip
    put(y + token * width + column + k, numbers * factor, column + k < width)
