"""Decode attention over a cache of bytes, for NVIDIA's matrix instructions.

Keys and values are the left operands, as f16, which holds int8 and E4M3 exactly, and a group's queries the right ones: few of a
product's columns are idle. A word of the cache has four of a lane's numbers. The sum over a key's columns may be taken in any
order, as long as queries have that order too, and so may the sum over tokens. For two tokens' words a byte permutation pairs
their values, since a register has two tokens of one column. A warp is a program, and waits for no other one.
"""

import triton
import triton.language as tl

from .attention import LOG2E, begin_of, softcapped
from .common import _INTERPRETED, enter, from_e4m3, put

PAGE = tl.constexpr(16)
"""Tokens that lie in one block of the cache."""
STEP = tl.constexpr(32)
"""Tokens of a step."""
LEAST = tl.constexpr(1e-37)
"""What is divided by instead of 0."""

_SIGNED = (
    "prmt.b32 {0}, {2}, 0x64646464, 0x4140; sub.rn.f16x2 {0}, {0}, zero;"
    " prmt.b32 {1}, {2}, 0x64646464, 0x4342; sub.rn.f16x2 {1}, {1}, zero;"
)
"""Bytes that are 128 more than a number, below the bits of 1,024, whose ulp is one in f16."""
_E4M3 = "mov.b32 {{low, high}}, {2}; cvt.rn.f16x2.e4m3x2 {0}, low; cvt.rn.f16x2.e4m3x2 {1}, high;"


def of_word(signed: bool) -> str:
    """The instructions for the numbers of a word: the first two, and the others."""
    if signed:
        begin = "{ .reg .b32 zero, word; mov.b32 zero, 0x64806480; xor.b32 word, $2, 0x80808080;"
        return f"{begin} {_SIGNED.format('$0', '$1', 'word')} }}"
    return f"{{ .reg .b16 low, high; {_E4M3.format('$0', '$1', '$2')} }}"


def of_two(signed: bool) -> str:
    """The instructions for two words: the first numbers of both, the second ones, and so on."""
    begin = "{ .reg .b16 low, high; .reg .b32 zero, first, second;"
    begin += " prmt.b32 first, $4, $5, 0x5140; prmt.b32 second, $4, $5, 0x7362;"
    if signed:
        begin += " mov.b32 zero, 0x64806480; xor.b32 first, first, 0x80808080; xor.b32 second, second, 0x80808080;"
    numbers = _SIGNED if signed else _E4M3
    return f"{begin} {numbers.format('$0', '$1', 'first')} {numbers.format('$2', '$3', 'second')} }}"


@triton.jit
def _halves(bits):
    """The f16 numbers in the low and the high half of words, [..., 2]."""
    low = bits.to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True))


@triton.jit
def _number(words, PLACE: tl.constexpr, SIGNED: tl.constexpr):
    """A byte's number, without instructions of the GPU's own."""
    code = ((words >> (8 * PLACE)) & 255).to(tl.uint8)
    return code.to(tl.int8, bitcast=True).to(tl.float32) if SIGNED else from_e4m3(code, tl.float32, False)


@triton.jit
def _of_word(words, SIGNED: tl.constexpr, DECODED_BY: tl.constexpr):
    """Of words [...] the numbers [..., first or second of two, which two]."""
    if _INTERPRETED:
        low = tl.join(_number(words, 0, SIGNED), _number(words, 1, SIGNED))
        high = tl.join(_number(words, 2, SIGNED), _number(words, 3, SIGNED))
    else:
        first, second = tl.inline_asm_elementwise(
            DECODED_BY, "=&r,=&r,r", [words], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
        low, high = _halves(first), _halves(second)
    return tl.join(low, high)


@triton.jit
def _both(one, other, PLACE: tl.constexpr, SIGNED: tl.constexpr):
    return tl.join(_number(one, PLACE, SIGNED), _number(other, PLACE, SIGNED))


@triton.jit
def _of_two(one, other, SIGNED: tl.constexpr, DECODED_BY: tl.constexpr):
    """Of two tokens' words [...] the numbers [..., token, first or second of two, which two]."""
    if _INTERPRETED:
        low = tl.join(_both(one, other, 0, SIGNED), _both(one, other, 1, SIGNED))
        high = tl.join(_both(one, other, 2, SIGNED), _both(one, other, 3, SIGNED))
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            DECODED_BY,
            "=&r,=&r,=&r,=&r,r,r",
            [one, other],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        low, high = tl.join(_halves(first), _halves(second)), tl.join(_halves(third), _halves(fourth))
    return tl.join(low, high)


@triton.jit
def _keys(words, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, SIGNED: tl.constexpr, DECODED_BY: tl.constexpr):
    """[STEP, WIDTH] of words [STEP, WIDTH / 4]: a lane has four words beside each other of each 64 columns."""
    words = tl.reshape(words, [STEP, WIDTH // 64, 4, 4])
    numbers = _of_word(words, SIGNED, DECODED_BY)  # token, columns, lane, word, next, pair
    numbers = tl.permute(numbers, (0, 1, 3, 2, 5, 4) if TOGETHER == 4 else (0, 1, 3, 5, 2, 4))
    return tl.reshape(numbers, [STEP, WIDTH])


@triton.jit
def _queries(queries, ROWS: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """[WIDTH, ROWS] of queries [ROWS, WIDTH], in the order of ``_keys``."""
    queries = tl.reshape(queries, [ROWS, WIDTH // 64, 4, 4, 2, 2])  # pair, next
    queries = tl.permute(queries, (1, 3, 2, 4, 5, 0) if TOGETHER == 4 else (1, 3, 4, 2, 5, 0))
    return tl.reshape(queries, [WIDTH, ROWS])


@triton.jit
def _values(one, other, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, SIGNED: tl.constexpr, DECODED_BY: tl.constexpr):
    """[WIDTH, STEP] of the words of even and of odd tokens [STEP / 2, WIDTH / 4]. Of eight lanes each has as many columns."""
    if TOGETHER == 4:
        one = tl.reshape(one, [STEP // PAGE, 4, 2, 8, WIDTH // 32])  # page, lane, two tokens, columns, word
        other = tl.reshape(other, [STEP // PAGE, 4, 2, 8, WIDTH // 32])
    else:
        one = tl.permute(tl.reshape(one, [STEP // PAGE, 2, 4, 8, WIDTH // 32]), (0, 2, 1, 3, 4))
        other = tl.permute(tl.reshape(other, [STEP // PAGE, 2, 4, 8, WIDTH // 32]), (0, 2, 1, 3, 4))
    numbers = _of_two(one, other, SIGNED, DECODED_BY)  # with: token, next, pair
    numbers = tl.permute(numbers, (4, 7, 6, 3, 0, 1, 2, 5) if TOGETHER == 4 else (4, 7, 6, 3, 0, 2, 1, 5))
    return tl.reshape(numbers, [WIDTH, STEP])


@triton.jit
def _pages(blocks, n, begin, end, BLOCK_SIZE: tl.constexpr):
    """The step's pages from token n on, the nearest ones where there are no such: blocks, and their first tokens."""
    page = n + tl.arange(0, STEP // PAGE) * PAGE
    page = tl.maximum(tl.minimum(page, (end - 1) // PAGE * PAGE), begin // PAGE * PAGE)
    return tl.load(blocks + page // BLOCK_SIZE), page


@triton.jit
def _inside(token, page, begin, end, WINDOWED: tl.constexpr):
    """Tokens of each page [pages, tokens] from its first one on, the nearest ones where there are no such: what is read is
    finite where the sequence's own is."""
    token = tl.minimum(token[None, :], end - 1 - page[:, None])
    return tl.maximum(token, begin - page[:, None]) if WINDOWED else token


@triton.jit
def _read(cache, rows, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """The words of rows, [COUNT, WORDS]."""
    rows = tl.multiple_of(tl.reshape(rows, [COUNT]), 16)
    words = cache.to(tl.pointer_type(tl.uint32), bitcast=True)
    return tl.load(words + rows[:, None] + tl.arange(0, WORDS)[None, :])


@triton.jit(do_not_specialize=["table_width", "splits"])
def attend_words(
    q, k, v, k_scale, v_scale, sinks, seq_starts, offsets, table, y, part_y, part_most, part_total,
    table_width, kv_heads, scale, softcap, window, splits,
    WHOLE: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    DOT: tl.constexpr, TOGETHER: tl.constexpr, KEYS_BY: tl.constexpr, VALUES_BY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """As ``attention.attend`` for sequences with one token; bytes are of int8 (SCALED) or E4M3. Grid: sequences, KV heads,
    parts. WIDTH is 64 or 128, and GROUP no more than ROWS."""
    enter(EARLY)
    seq = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(offsets + seq)
    end = tl.load(seq_starts + seq) + 1
    if tl.load(offsets + seq + 1) - first != 1:
        return
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, end - window)
    if not WHOLE:
        begin = tl.maximum(begin, begin_of(split, FIRST, SPLIT))
        end = tl.minimum(end, begin_of(split + 1, FIRST, SPLIT))
        if begin >= end:
            return

    member = tl.arange(0, ROWS)
    there = member < GROUP
    column = tl.arange(0, WIDTH)
    q_head = head * GROUP + member
    row = first.to(tl.int64) * kv_heads * GROUP + q_head
    queries = tl.load(q + row[:, None] * WIDTH + column[None, :], mask=there[:, None], other=0).to(tl.float32)
    # By a power of two, as f16 has not the range of bf16.
    size = tl.max(tl.abs(queries), 1).to(tl.uint32, bitcast=True) & 0x7F800000
    size = tl.minimum(tl.maximum(size, 0x00800000), 0x7E800000)
    queries = queries * (0x7F000000 - size).to(tl.float32, bitcast=True)[:, None]
    by = size.to(tl.float32, bitcast=True) * scale
    queries = _queries(queries, ROWS, WIDTH, TOGETHER).to(DOT)

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([8, ROWS], tl.float32)
    unit = 0.0
    mixed = tl.zeros([WIDTH, ROWS], tl.float32)
    blocks = table + seq * table_width
    token = tl.arange(0, PAGE)
    pair = tl.arange(0, PAGE // 2) * 2
    start = begin // STEP * STEP
    block, page = _pages(blocks, start, begin, end, BLOCK_SIZE)
    for n in range(start, end, STEP):
        slots = (block.to(tl.int64) * BLOCK_SIZE + page % BLOCK_SIZE) * kv_heads + head
        rows = slots[:, None] * (WIDTH // 4)
        tokens = _inside(token, page, begin, end, WINDOWED) * kv_heads
        even = rows + _inside(pair, page, begin, end, WINDOWED) * (kv_heads * (WIDTH // 4))
        odd = rows + _inside(pair + 1, page, begin, end, WINDOWED) * (kv_heads * (WIDTH // 4))
        keys = _read(k, rows + tokens * (WIDTH // 4), STEP, WIDTH // 4)
        one = _read(v, even, STEP // 2, WIDTH // 4)
        other = _read(v, odd, STEP // 2, WIDTH // 4)
        block, page = _pages(blocks, n + STEP, begin, end, BLOCK_SIZE)
        keys = _keys(keys, WIDTH, TOGETHER, SCALED, KEYS_BY).to(DOT)
        scores = tl.dot(keys, queries, input_precision="ieee") * by[None, :]
        if SCALED:
            places = tl.reshape(slots[:, None] + tokens, [STEP])
            key_scales = tl.load(k_scale + places)
            value_scales = tl.load(v_scale + places)
            scores = scores * key_scales[:, None]
        if CAPPED:
            scores = softcapped(scores, softcap)
        place = n + tl.arange(0, STEP)
        seen = (place >= begin) & (place < end)
        scores = tl.where(seen[:, None], scores * LOG2E, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - level[None, :])
        fading = tl.exp2(most - level)
        most = higher
        total = total * fading[None, :] + tl.sum(tl.reshape(shares, [STEP // 8, 8, ROWS]), 0)
        if SCALED:
            # As parts of the greatest one so far, or they might be too small for f16.
            wider = tl.maximum(unit, tl.max(value_scales, 0))
            less = 1.0 / tl.maximum(wider, LEAST)
            shares = shares * (value_scales * less)[:, None]
            fading = fading * (unit * less)
            unit = wider
        values = _values(one, other, WIDTH, TOGETHER, SCALED, VALUES_BY).to(DOT)
        mixed = tl.dot(values, shares.to(DOT), mixed * fading[None, :], input_precision="ieee")

    total = tl.sum(total, 0)
    if SCALED:
        mixed = mixed * unit
    mixed = tl.reshape(tl.permute(tl.reshape(mixed, [WIDTH // 8, 8, ROWS]), (2, 1, 0)), [ROWS, WIDTH])
    if WHOLE:
        if SINKS:
            sink = tl.load(sinks + q_head, mask=there, other=0).to(tl.float32) * LOG2E
            higher = tl.maximum(most, sink)
            fading = tl.exp2(most - higher)
            total = total * fading + tl.exp2(sink - higher)
            mixed = mixed * fading[:, None]
        put(y + row[:, None] * WIDTH + column[None, :], mixed / total[:, None], there[:, None])
    else:
        part = (seq * kv_heads * GROUP + q_head).to(tl.int64) * splits + split
        tl.store(part_y + part[:, None] * WIDTH + column[None, :], mixed, mask=there[:, None])
        tl.store(part_most + part, most, mask=there)
        tl.store(part_total + part, total, mask=there)
