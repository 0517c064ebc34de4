"""Products of few rows with codes, for NVIDIA's matrix instructions.

Memory is what takes the time of such products, as long as a weight costs no more than some three instructions. So codes become
operands in the registers of the lane that multiplies them, two in one instruction where they have up to seven bits (they are
or-ed below the bits of 128, or in f16 of 1,024, whose ulp is one), and factors are applied to the sums of a group of columns.
Each warp has groups of its own.
"""

from functools import cache

import numpy as np
import triton
import triton.language as tl

from .common import _INTERPRETED
from .matmul import finish, meant, rows_of


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
    """[SPANS * 32 / GROUP, ROWS, GROUP] of words [ROWS, SPANS * BITS] as ``repack.packed_codes`` has them, groups of 16 the first
    of each span before the second. In this order of steps all of it stays in its lane, for the compiler carries the layout of
    an operand through them to where words are read."""
    if BITS == 4:
        words = tl.permute(tl.reshape(words, [ROWS, SPANS, 4]), (2, 1, 0))
        numbers = _nibbles(words, MEANING, TABLE, DECODED_BY, HALF)  # lane, span, row, next, pair, hi
    else:
        words = tl.permute(tl.reshape(words, [ROWS, SPANS, 4, 2]), (2, 1, 0, 3))
        numbers = tl.permute(_octets(words, ZERO, MORE, DECODED_BY, HALF), (0, 1, 2, 4, 5, 3))
    if GROUP == 16:
        numbers = tl.permute(numbers, (0, 4, 3, 5, 1, 2) if TOGETHER == 4 else (4, 0, 3, 5, 1, 2))
    else:
        numbers = tl.permute(numbers, (5, 0, 4, 3, 1, 2) if TOGETHER == 4 else (5, 4, 0, 3, 1, 2))
    return tl.permute(tl.reshape(numbers, [GROUP, SPANS * 32 // GROUP, ROWS]), (1, 2, 0))


@triton.jit
def _read(pointer, n, there, group, count, SPAN: tl.constexpr):
    """What every SPAN groups have, [groups, outputs]: 0 beyond the last."""
    place = group // SPAN
    return tl.load(
        pointer + n[None, :] * count + place[:, None], mask=there[None, :] & (place < count)[:, None], other=0
    )


@triton.jit
def _read_factors(
    pointer, fine, n, there, group, supers, groups, GROUP: tl.constexpr, SUPER: tl.constexpr, FINE: tl.constexpr
):
    value = _read(pointer, n, there, group, supers, SUPER // GROUP)
    return value, _read(fine, n, there, group, groups, 1) if FINE else value


@triton.jit
def _factor(value, fine, FINE: tl.constexpr):
    return value.to(tl.float32) * fine.to(tl.float32) if FINE else value.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def few_coded(
    x, codes, scale, fine_scale, least, fine_least, bias, residual, y, order, experts,
    rows, outputs, depth, first, second, part, code_row, groups, supers, x_row, y_row, choices,
    BITS: tl.constexpr, TOGETHER: tl.constexpr, MEANING: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr,
    MORE: tl.constexpr, DECODED_BY: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    FINE: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, JOINED: tl.constexpr, GROUPED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As ``matmul.quantized``, of GROUP 16 or 32 columns, or of 32 of a larger group. BK is 32 for each warp; ``part`` is of
    whole BK. DECODED_BY: the instructions that decode a word, by which numbers come out MORE than they are."""
    HALF: tl.constexpr = tl.float16 if tl.float16 == DOT else tl.bfloat16
    STEP: tl.constexpr = BK // GROUP
    SPANS: tl.constexpr = BK // 32
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
    word = tl.arange(0, BK * BITS // 32)
    scale, least = scale + expert * outputs * supers, least + expert * outputs * supers
    fine_scale, fine_least = fine_scale + expert * outputs * groups, fine_least + expert * outputs * groups
    begin = tl.program_id(2) * part if PARTS else 0
    group = tl.arange(0, STEP)
    if GROUP == 16:
        group = group % SPANS * 2 + group // SPANS
    group += begin // GROUP
    scales, fine_scales = _read_factors(scale, fine_scale, n, there, group, supers, groups, GROUP, SUPER, FINE)
    leasts, fine_leasts = scales, fine_scales
    if LEAST:
        leasts, fine_leasts = _read_factors(least, fine_least, n, there, group, supers, groups, GROUP, SUPER, FINE)
    ones = tl.full([STEP, 16, GROUP // 2], 1.0, DOT)
    ones = tl.reshape(tl.join(ones, ones), [STEP, 16, GROUP])  # a join, or this product's operands lie otherwise
    sums = tl.zeros([STEP, BN, BM], tl.float32)
    for column in range(begin, tl.minimum(begin + part, depth), BK):
        a = tl.load(words + (column * BITS // 32 + word)[None, :])
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
        by, less = _factor(scales, fine_scales, FINE), _factor(leasts, fine_leasts, FINE)
        group += STEP
        # A step before they are needed, which else waits for memory.
        scales, fine_scales = _read_factors(scale, fine_scale, n, there, group, supers, groups, GROUP, SUPER, FINE)
        if LEAST:
            leasts, fine_leasts = _read_factors(least, fine_least, n, there, group, supers, groups, GROUP, SUPER, FINE)
        sums += products * by[:, :, None]
        if LEAST:
            sums -= totals * less[:, :, None]
    if PARTS:
        y += tl.program_id(2).to(tl.int64) * rows * outputs
    finish(
        tl.sum(sums, 0), bias + expert * outputs, residual, y, m, row_there, n, outputs, 0, y_row, BIASED, ADDED,
        rows, first, second, JOINED,
    )  # fmt: skip
