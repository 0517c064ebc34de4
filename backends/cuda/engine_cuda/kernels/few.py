"""Products of few rows with codes, for NVIDIA's matrix instructions.

Memory is what takes the time of such products, as long as a weight costs no more than some three instructions. So codes become
operands in the registers of the lane that multiplies them, two in one instruction where they have up to seven bits (they are
or-ed below the bits of 128, or in f16 of 1,024, whose ulp is one), and factors are applied to the sums of a group of columns.
Each warp has groups of its own. Codes and factors lie in memory as lanes take them (``repack.packed_codes``, ``repack.tiled``): a
lane reads its codes of two rows at a time and the factors of its four rows of a tile at once, and none of it changes places.
"""

from functools import cache

import numpy as np
import triton
import triton.language as tl

from .common import _INTERPRETED
from .matmul import finish, meant, rows_of

WARPS = 4
"""Of a program. So many spans of 32 columns have sums of their own, every fourth the same, whatever a step's columns are."""
_WARPS = tl.constexpr(WARPS)


def _instructions(low: list[int], high: list[int]) -> str:
    """Of a word's eight nibbles the numbers of a table, by the low and the high bytes of its sixteen, four to a word: four words
    of the nibbles n and n + 4. A byte permutation takes eight bytes, so a third one chooses between two by the nibble's highest
    bit."""
    half = """
        prmt.b32 first, {low[0]:#x}, {low[1]:#x}, index; prmt.b32 second, {low[2]:#x}, {low[3]:#x}, index;
        prmt.b32 lows, first, second, chosen;
        prmt.b32 first, {high[0]:#x}, {high[1]:#x}, index; prmt.b32 second, {high[2]:#x}, {high[3]:#x}, index;
        prmt.b32 highs, first, second, chosen;
        prmt.b32 {even}, lows, highs, 0x6240; prmt.b32 {odd}, lows, highs, 0x7351;"""
    begin = """{ .reg .b32 index, chosen, first, second, lows, highs;
        prmt.b32 index, $4, 0, 0x3120;
        shr.u32 chosen, index, 1; lop3.b32 chosen, chosen, 0x44444444, 0x32103210, 0xEA;
        and.b32 index, index, 0x77777777;"""
    other = "shr.u32 index, index, 16; shr.u32 chosen, chosen, 16;"
    halves = [half.format(low=low, high=high, even=f"${n}", odd=f"${n + 1}") for n in (0, 2)]
    return f"{begin}{halves[0]}{other}{halves[1]} }}"


BEGUN = {"bf16": 128, "fp16": 1024}
"""By type what codes are or-ed below the bits of: its ulp is one."""


def added(bits: int, dtype: str) -> str:
    """The instruction for two codes 16 bits apart in a word, of four bits or up to seven: both larger by what is BEGUN with. One,
    of which the compiler of Triton 3.6 makes two."""
    mask, begun = {4: 0x000F000F, 8: 0x007F007F}[bits], {"bf16": 0x43004300, "fp16": 0x64006400}[dtype]
    return f"lop3.b32 $0, $1, {mask:#x}, {begun:#x}, 0xEA;"


def widened(zero: int, dtype: str) -> str:
    """The instructions for a word's four bytes less ``zero``, as f16 or bf16: two words of the bytes n and n + 2. A byte is the
    lowest of 2^23 in f32, whose ulp is one."""
    begin = "{ .reg .b32 word<4>; .reg .f32 number<4>;"
    taken = "".join(
        f" prmt.b32 word{n}, $2, 0x4B000000, {0x7650 + n:#x}; mov.b32 number{n}, word{n};"
        f" sub.f32 number{n}, number{n}, 0f{0x4B000000 + zero:08X};"
        for n in range(4)
    )
    kind = "bf16x2" if dtype == "bf16" else "f16x2"
    return f"{begin}{taken} cvt.rn.{kind}.f32 $0, number2, number0; cvt.rn.{kind}.f32 $1, number3, number1; }}"


def _counted(zero: int) -> tl.constexpr:
    """The instructions for a word's four bytes, less ``zero``, in f32: 0, or 128 for those of int8."""
    begin = f"{{ .reg .b32 word, bits; .reg .f32 number; xor.b32 word, $4, {0x01010101 * zero:#x};"
    taken = "".join(
        f" prmt.b32 bits, word, 0x4B000000, {0x7650 + n:#x}; mov.b32 number, bits;"
        f" sub.f32 ${n}, number, 0f{0x4B000000 + zero:08X};"
        for n in range(4)
    )
    return tl.constexpr(f"{begin}{taken} }}")


COUNTED, SIGNED = _counted(0), _counted(128)


@cache
def looked_up(numbers: bytes, dtype: str) -> str:
    """The instructions for a table of sixteen f32 numbers, as f16 or bf16."""
    table = np.frombuffer(numbers, np.float32)
    wide = table.view(np.uint32)
    rounded = wide + 0x7FFF + (wide >> 16 & 1) >> 16
    bits = rounded if dtype == "bf16" else table.astype(np.float16).view(np.uint16)
    low, high = ((bits >> shift & 255).astype(np.uint8).view("<u4").tolist() for shift in (0, 8))
    return _instructions(low, high)


@triton.jit
def _added(words, SHIFT: tl.constexpr, BITS: tl.constexpr, DECODED_BY: tl.constexpr):
    """The codes at SHIFT and 16 bits beyond, as ``added`` says; the interpreter, which has no instructions, does it for bf16."""
    shifted = words >> SHIFT
    if _INTERPRETED:
        return (shifted & (0x000F000F if BITS == 4 else 0x007F007F)) | 0x43004300
    else:
        return tl.inline_asm_elementwise(DECODED_BY, "=r,r", [shifted], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _two(bits, HALF: tl.constexpr):
    """The numbers in the low and the high half of words, [..., 2]."""
    low = bits.to(tl.uint16).to(HALF, bitcast=True)
    return tl.join(low, (bits >> 16).to(tl.uint16).to(HALF, bitcast=True))


@triton.jit
def _plain(words, SHIFT: tl.constexpr, MEANING: tl.constexpr, TABLE: tl.constexpr):
    """What the nibbles SHIFT // 4 and SHIFT // 4 + 4 mean, f32 [..., 2]."""
    return meant(tl.join((words >> SHIFT) & 15, (words >> (SHIFT + 16)) & 15).to(tl.uint8), MEANING, TABLE, False)


@triton.jit
def _nibbles(words, MEANING: tl.constexpr, TABLE: tl.constexpr, DECODED_BY: tl.constexpr, HALF: tl.constexpr):
    """Of words [...] the numbers [..., next, pair, hi]."""
    if MEANING == "codes":
        low = tl.join(_two(_added(words, 0, 4, DECODED_BY), HALF), _two(_added(words, 4, 4, DECODED_BY), HALF))
        high = tl.join(_two(_added(words, 8, 4, DECODED_BY), HALF), _two(_added(words, 12, 4, DECODED_BY), HALF))
    elif _INTERPRETED:
        low = tl.join(_plain(words, 0, MEANING, TABLE), _plain(words, 4, MEANING, TABLE))
        high = tl.join(_plain(words, 8, MEANING, TABLE), _plain(words, 12, MEANING, TABLE))
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            DECODED_BY,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        low, high = tl.join(_two(first, HALF), _two(second, HALF)), tl.join(_two(third, HALF), _two(fourth, HALF))
    return tl.join(low, high)


@triton.jit
def _wide(words, SHIFT: tl.constexpr, ZERO: tl.constexpr):
    """The bytes at SHIFT and 16 bits beyond less ZERO, f32 [..., 2]."""
    return tl.join((words >> SHIFT) & 255, (words >> (SHIFT + 16)) & 255).to(tl.float32) - ZERO


@triton.jit
def _octets(words, ZERO: tl.constexpr, MORE: tl.constexpr, DECODED_BY: tl.constexpr, HALF: tl.constexpr):
    """Of words [..., hi] the numbers [..., hi, next, pair]."""
    if MORE:
        return tl.join(_two(_added(words, 0, 8, DECODED_BY), HALF), _two(_added(words, 8, 8, DECODED_BY), HALF))
    elif _INTERPRETED:
        return tl.join(_wide(words, 0, ZERO), _wide(words, 8, ZERO))
    else:
        first, second = tl.inline_asm_elementwise(
            DECODED_BY, "=r,=r,r", [words], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
        return tl.join(_two(first, HALF), _two(second, HALF))


@triton.jit
def _spread(
    words, BITS: tl.constexpr, TOGETHER: tl.constexpr, MEANING: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr,
    MORE: tl.constexpr, DECODED_BY: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    """[SPANS * 32 / GROUP, ROWS, GROUP] of words [ROWS / 16, SPANS * BITS * 16] as ``repack.packed_codes`` has them, groups of 16
    the first of each span before the second. In this order of steps all of it stays in its lane, for the compiler carries the
    layout of an operand through them to where words are read."""
    if BITS == 4:
        words = tl.permute(tl.reshape(words, [ROWS // 16, SPANS, 8, 4, 2]), (3, 1, 0, 4, 2))
        words = tl.reshape(words, [4, SPANS, ROWS])
        numbers = _nibbles(words, MEANING, TABLE, DECODED_BY, HALF)  # lane, span, row, next, pair, hi
    else:
        words = tl.permute(tl.reshape(words, [ROWS // 16, SPANS, 8, 4, 2, 2]), (3, 1, 0, 4, 2, 5))
        words = tl.reshape(words, [4, SPANS, ROWS, 2])
        numbers = tl.permute(_octets(words, ZERO, MORE, DECODED_BY, HALF), (0, 1, 2, 4, 5, 3))
    if GROUP == 16:
        numbers = tl.permute(numbers, (0, 4, 3, 5, 1, 2) if TOGETHER == 4 else (4, 0, 3, 5, 1, 2))
    else:
        numbers = tl.permute(numbers, (5, 0, 4, 3, 1, 2) if TOGETHER == 4 else (5, 4, 0, 3, 1, 2))
    return tl.permute(tl.reshape(numbers, [GROUP, SPANS * 32 // GROUP, ROWS]), (1, 2, 0))


@triton.jit
def _read(pointer, tile, group, count, SPAN: tl.constexpr):
    """What every SPAN groups have, of a lane's four rows in a word or two, [groups, tiles, 8(, 2)]. Beyond the last it is the
    last's, for columns that are 0. They are fewer words than threads, which therefore each read their own."""
    place = tl.minimum(group // SPAN, count - 1)
    at = (tile[None, :, None] * count + place[:, None, None]) * 8 + tl.arange(0, 8)[None, None, :]
    if pointer.dtype.element_ty.primitive_bitwidth == 8:
        return tl.load(pointer.to(tl.pointer_type(tl.uint32), bitcast=True) + at)
    elif pointer.dtype.element_ty.primitive_bitwidth == 16:
        return tl.load(pointer.to(tl.pointer_type(tl.uint64), bitcast=True) + at)
    else:
        wide = pointer.to(tl.pointer_type(tl.uint64), bitcast=True) + 2 * at
        return tl.join(tl.load(wide), tl.load(wide + 1))


@triton.jit
def _counts(words, KIND: tl.constexpr):
    """The bytes of words, f32 [..., 4]."""
    if _INTERPRETED:
        low = tl.join((words & 255).to(tl.uint8), ((words >> 16) & 255).to(tl.uint8))
        high = tl.join(((words >> 8) & 255).to(tl.uint8), (words >> 24).to(tl.uint8))
        return tl.join(low, high).to(KIND, bitcast=True).to(tl.float32)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            SIGNED if tl.int8 == KIND else COUNTED,
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _of_rows(words, KIND: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """f32 [GROUPS, ROWS] of what ``_read`` has read."""
    if KIND.primitive_bitwidth == 8:
        four = _counts(words, KIND)
    elif KIND.primitive_bitwidth == 16:
        four = _two(tl.join(words.to(tl.uint32), (words >> 32).to(tl.uint32)), KIND).to(tl.float32)
    else:
        four = tl.join(words.to(tl.uint32), (words >> 32).to(tl.uint32)).to(tl.float32, bitcast=True)
    four = tl.reshape(four, [GROUPS, ROWS // 32, 8, 4])
    return tl.reshape(tl.permute(four, (0, 1, 3, 2)), [GROUPS, ROWS])


@triton.jit
def _read_factors(
    pointer, fine, tile, group, supers, groups, GROUP: tl.constexpr, SUPER: tl.constexpr, FINE: tl.constexpr
):
    value = _read(pointer, tile, group, supers, SUPER // GROUP)
    return value, _read(fine, tile, group, groups, 1) if FINE else value


@triton.jit
def _factor(
    value,
    fine,
    KIND: tl.constexpr,
    FINE_KIND: tl.constexpr,
    FINE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """f32 [GROUPS, ROWS, 1]"""
    factor = _of_rows(value, KIND, GROUPS, ROWS)
    if FINE:
        factor *= _of_rows(fine, FINE_KIND, GROUPS, ROWS)
    return factor[:, :, None]


@triton.jit
def _rounds(x, HALVES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of x [HALVES * 2 * WARPS, ROWS, COLUMNS] the first WARPS of each half, and the second."""
    x = tl.permute(tl.reshape(x, [HALVES, 2, _WARPS, ROWS, COLUMNS]), (0, 2, 3, 4, 1))
    return tl.split(tl.reshape(x, [HALVES * _WARPS, ROWS, COLUMNS, 2]))


@triton.jit
def _summed(sums, products, by, totals, less, LEAST: tl.constexpr):
    sums += products * by
    if LEAST:
        sums -= totals * less
    return sums


@triton.jit(do_not_specialize=["rows"])
def few_coded(
    x, codes, scale, fine_scale, least, fine_least, bias, residual, y, order, experts,
    rows, outputs, depth, first, second, part, code_row, groups, supers, x_row, y_row, choices,
    BITS: tl.constexpr, TOGETHER: tl.constexpr, MEANING: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr,
    MORE: tl.constexpr, DECODED_BY: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    FINE: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, JOINED: tl.constexpr, GROUPED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As ``matmul.quantized``, of GROUP 16 or 32 columns, or of 32 of a larger group. BK is 32 or 64 for each warp; ``part`` is
    of whole BK. DECODED_BY: the instructions that decode a word, by which numbers come out MORE than they are."""
    HALF: tl.constexpr = tl.float16 if tl.float16 == DOT else tl.bfloat16
    STEP: tl.constexpr = BK // GROUP
    SPANS: tl.constexpr = BK // 32
    HALVES: tl.constexpr = 32 // GROUP
    WORDS: tl.constexpr = BITS * 16  # of 16 rows and 32 columns
    KIND: tl.constexpr = scale.dtype.element_ty
    FINE_KIND: tl.constexpr = fine_scale.dtype.element_ty
    expert = tl.cast(0, tl.int64)
    if GROUPED:
        expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
        if expert < 0:
            return
    m, row_there = rows_of(order, tl.program_id(0), rows, GROUPED, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    tiles = (outputs + 31) // 32
    tile = tl.minimum(tl.program_id(1) * (BN // 32) + tl.arange(0, BN // 32), tiles - 1)
    words = codes.to(tl.pointer_type(tl.uint32), bitcast=True)
    sixteen = tl.minimum(tl.program_id(1) * (BN // 16) + tl.arange(0, BN // 16), 2 * tiles - 1)
    words += (expert * tiles * 2 + sixteen.to(tl.int64))[:, None] * (code_row // 4)
    x_rows = x + (m // choices).to(tl.int64)[:, None] * x_row
    k = tl.arange(0, BK)
    word = tl.arange(0, SPANS * WORDS)
    scale, least = scale + expert * tiles * 32 * supers, least + expert * tiles * 32 * supers
    fine_scale, fine_least = fine_scale + expert * tiles * 32 * groups, fine_least + expert * tiles * 32 * groups
    begin = tl.program_id(2) * part if PARTS else 0
    group = tl.arange(0, STEP)
    if GROUP == 16:
        group = group % SPANS * 2 + group // SPANS
    group += begin // GROUP
    scales, fine_scales = _read_factors(scale, fine_scale, tile, group, supers, groups, GROUP, SUPER, FINE)
    leasts, fine_leasts = scales, fine_scales
    if LEAST:
        leasts, fine_leasts = _read_factors(least, fine_least, tile, group, supers, groups, GROUP, SUPER, FINE)
    ones = tl.full([STEP, 16, GROUP // 2], 1.0, DOT)
    ones = tl.reshape(tl.join(ones, ones), [STEP, 16, GROUP])  # a join, or this product's operands lie otherwise
    sums = tl.zeros([HALVES * _WARPS, BN, BM], tl.float32)
    for column in range(begin, tl.minimum(begin + part, depth), BK):
        here = column // 32 * WORDS + word
        a = tl.load(words + here[None, :], mask=(here < code_row // 4)[None, :], other=0)
        a = _spread(a, BITS, TOGETHER, MEANING, TABLE, ZERO, MORE, DECODED_BY, HALF, GROUP, BN, SPANS).to(DOT)
        columns = (column + k)[None, :]
        b = tl.load(x_rows + columns, mask=row_there[:, None] & (columns < depth), other=0)
        if GROUP == 16:
            b = tl.reshape(tl.permute(tl.reshape(b, [BM, SPANS, 2, 16]), (0, 2, 1, 3)), [BM, STEP, 16])
        else:
            b = tl.reshape(b, [BM, STEP, 32])
        b = tl.permute(b, (1, 2, 0)).to(DOT)
        if MORE or LEAST:
            # The sums of x, by a product, since its result lies as that of the other one.
            totals = tl.dot(ones, b, input_precision=PRECISION)
            totals = tl.reshape(tl.broadcast_to(totals[:, None, :, :], [STEP, BN // 16, 16, BM]), [STEP, BN, BM])
        if MORE:
            products = tl.dot(a, b, totals * -MORE, input_precision=PRECISION)
        else:
            products = tl.dot(a, b, input_precision=PRECISION)
        by = _factor(scales, fine_scales, KIND, FINE_KIND, FINE, STEP, BN)
        less = by
        if LEAST:
            less = _factor(leasts, fine_leasts, KIND, FINE_KIND, FINE, STEP, BN)
        else:
            totals = products
        if SPANS == _WARPS:
            sums = _summed(sums, products, by, totals, less, LEAST)
        else:
            products, later_products = _rounds(products, HALVES, BN, BM)
            totals, later_totals = _rounds(totals, HALVES, BN, BM)
            by, later_by = _rounds(by, HALVES, BN, 1)
            less, later_less = _rounds(less, HALVES, BN, 1)
            sums = _summed(sums, products, by, totals, less, LEAST)
            sums = _summed(sums, later_products, later_by, later_totals, later_less, LEAST)
        group += STEP
        # A step ahead, into the registers of those that are no longer needed: what is copied from others waits for memory.
        scales, fine_scales = _read_factors(scale, fine_scale, tile, group, supers, groups, GROUP, SUPER, FINE)
        if LEAST:
            leasts, fine_leasts = _read_factors(least, fine_least, tile, group, supers, groups, GROUP, SUPER, FINE)
    if PARTS:
        y += tl.program_id(2).to(tl.int64) * rows * outputs
    finish(
        tl.sum(sums, 0), bias + expert * outputs, residual, y, m, row_there, n, outputs, 0, y_row, BIASED, ADDED,
        rows, first, second, JOINED,
    )  # fmt: skip
