"""Layers whose memory does not grow with the tokens: a causal convolution, attention by the gated delta rule, and the scan of
state-space layers.

A decode step reads and writes a layer's memory once for each sequence, which is 2 * 4 bytes for each number of S of all heads,
beside 4 * (W - 1) * columns bytes of the tail, read twice and written once. No step can take less time than these bytes do.
"""

import triton
import triton.language as tl

from .common import find_sequence, put


@triton.jit
def _before(table, start, BLOCK_SIZE: tl.constexpr):
    """The block of the token before a sequence's first of the step; it is not read where there is none."""
    return tl.load(table + (start - 1) // BLOCK_SIZE, mask=start > 0, other=0).to(tl.int64)


@triton.jit
def _recalled(x, tail, first, start, block, row, columns, end, width, W: tl.constexpr):
    """Columns before ``end`` of rows of x, counted from the W - 1 before the sequence's first of the step, which lie in the
    tail; f32."""
    seen = columns < tl.where(row >= W - 1, end, 0)
    remembered = columns < tl.where(row < W - 1, tl.where(start > 0, end, 0), 0)
    own = tl.load(x + (first + row - (W - 1)).to(tl.int64) * width + columns, mask=seen, other=0)
    kept = tl.load(tail + (block * (W - 1) + row) * width + columns, mask=remembered, other=0)
    return tl.where(seen, own.to(tl.float32), kept)


@triton.jit(do_not_specialize=["sequences", "table_width"])
def causal_conv(
    x, weight, bias, tail, seq_starts, offsets, table, y, sequences, table_width, width,
    W: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """A block of columns of one token a program."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    seq = find_sequence(offsets, sequences, token)
    first = tl.load(offsets + seq)
    start = tl.load(seq_starts + seq)
    block = _before(table + seq * table_width, start, BLOCK_SIZE)
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(W):
        taps = tl.load(weight + columns * W + n, mask=inside, other=0).to(tl.float32)
        total += taps * _recalled(x, tail, first, start, block, token - first + n, columns, width, width, W)
    if BIASED:
        total += tl.load(bias + columns, mask=inside, other=0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    put(y + token.to(tl.int64) * width + columns, total, inside)


@triton.jit(do_not_specialize=["table_width"])
def leave_tail(
    x, tail, seq_starts, offsets, table, table_width, width,
    W: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of columns of one sequence a program, after ``causal_conv`` has read all tails. The last block of tokens is
    written first, since the first one may be what the others are read from."""
    seq = tl.program_id(0)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    first = tl.load(offsets + seq)
    start = tl.load(seq_starts + seq)
    end = start + tl.load(offsets + seq + 1) - first
    if start == end:
        return
    blocks = table + seq * table_width
    before = _before(blocks, start, BLOCK_SIZE)
    rows = tl.arange(0, ROWS)[:, None]
    own = tl.where(rows < W - 1, width, 0)
    last = (end - 1) // BLOCK_SIZE
    for n in range(last - start // BLOCK_SIZE + 1):
        behind = tl.minimum(end, (last - n + 1) * BLOCK_SIZE) - start
        values = _recalled(x, tail, first, start, before, behind + rows, columns, own, width, W)
        block = tl.load(blocks + last - n).to(tl.int64)
        tl.debug_barrier()  # no thread writes what another one has yet to read
        tl.store(tail + (block * (W - 1) + rows) * width + columns, values, mask=columns < own)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to all digits where that is close to 0 and without overflow."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small
    return tl.where(x > 0, x, 0.0) + tl.where(more == 1.0, small, tl.log(more) * (small / (more - 1.0)))


@triton.jit
def _parts(x, token, there, width, first, second, third, row, column, rows, columns):
    """Of a token's row of x, as they are stored: what is read along the rows of S, from ``first`` and ``second`` on, and along
    its columns, from ``third`` on."""
    at = x + token.to(tl.int64) * width
    along = row < tl.where(there, rows, 0)
    one = tl.load(at + first + row, mask=along, other=0)
    other = tl.load(at + second + row, mask=along, other=0)
    return one, other, tl.load(at + third + column, mask=column < tl.where(there, columns, 0), other=0)


@triton.jit
def _gate(gates, token, there, head, heads):
    return tl.load(gates + token.to(tl.int64) * heads + head, mask=there, other=0)


@triton.jit
def _recalled_head(memory, blocks, start, head, heads, row, column, rows, columns, BLOCK_SIZE: tl.constexpr):
    """What a head remembers of the tokens before ``start``: S [rows, columns], zeros where there are none."""
    block = _before(blocks, start, BLOCK_SIZE)
    known = (row < tl.where(start > 0, rows, 0))[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    state = tl.load(memory + (block * heads + head) * (rows * columns) + place, mask=known, other=0)
    tl.debug_barrier()  # no thread writes what another one has yet to read
    return state


@triton.jit
def _leave_head(
    memory, blocks, state, behind, last, head, heads, row, column, rows, columns, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """After the ``behind``-th token of a sequence, if it ends its block or the step."""
    if (behind % BLOCK_SIZE == 0) | last:
        block = tl.load(blocks + (behind - 1) // BLOCK_SIZE).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        tl.store(memory + (block * heads + head) * (rows * columns) + place, state, mask=inside)


@triton.jit
def _unit(x, eps):
    wide = x.to(tl.float32)
    return wide / tl.sqrt_rn(tl.sum(wide * wide, axis=0) + eps)


@triton.jit(do_not_specialize=["table_width"])
def gated_delta(
    qkv, decay, beta, rate, bias, memory, seq_starts, offsets, table, y,
    table_width, share, key_heads, value_heads, key_dim, value_dim, scale, eps,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, value heads, blocks of BV value columns, which do not depend on each other. A program goes through its
    sequence's tokens with S [KEYS, BV] in registers; a token is read while the one before is computed."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(offsets + seq)
    length = tl.load(offsets + seq + 1) - first
    if length == 0:
        return
    start = tl.load(seq_starts + seq)
    blocks = table + seq * table_width
    key = tl.arange(0, KEYS)
    value = tl.program_id(2) * BV + tl.arange(0, BV)
    state = _recalled_head(memory, blocks, start, head, value_heads, key, value, key_dim, value_dim, BLOCK_SIZE)
    fading = tl.load(rate + head).to(tl.float32)
    more = tl.load(bias + head).to(tl.float32)
    of_q, keys = head // share * key_dim, key_heads * key_dim
    of_k, of_v = keys + of_q, 2 * keys + head * value_dim
    width = 2 * keys + value_heads * value_dim
    q, k, v = _parts(qkv, first, True, width, of_q, of_k, of_v, key, value, key_dim, value_dim)
    a = _gate(decay, first, True, head, value_heads)
    b = _gate(beta, first, True, head, value_heads)
    for n in range(length):
        then, there = first + n + 1, n + 1 < length
        next_q, next_k, next_v = _parts(
            qkv, then, there, width, of_q, of_k, of_v, key, value, key_dim, value_dim
        )  # fmt: skip
        next_a = _gate(decay, then, there, head, value_heads)
        next_b = _gate(beta, then, there, head, value_heads)
        unit = _unit(k, eps)[:, None]
        state *= tl.exp(fading * _softplus(a.to(tl.float32) + more))
        change = v.to(tl.float32) - tl.sum(unit * state, axis=0)
        state += unit * (change / (1.0 + tl.exp(-b.to(tl.float32))))[None, :]
        result = tl.sum((_unit(q, eps) * scale)[:, None] * state, axis=0)
        row = (first + n).to(tl.int64) * value_heads + head
        put(y + row * value_dim + value, result, value < value_dim)
        _leave_head(
            memory, blocks, state, start + n + 1, n + 1 == length, head, value_heads, key, value, key_dim, value_dim,
            BLOCK_SIZE,
        )  # fmt: skip
        q, k, v, a, b = next_q, next_k, next_v, next_a, next_b


@triton.jit(do_not_specialize=["table_width"])
def ssm_scan(
    xbc, dt, rate, bias, skip, memory, seq_starts, offsets, table, y,
    table_width, share, groups, heads, state_dim, head_dim,
    BLOCK_SIZE: tl.constexpr, STATE: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, heads, blocks of BV columns of a head. A program goes through its sequence's tokens with S [STATE, BV] in
    registers, as ``gated_delta`` does."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(offsets + seq)
    length = tl.load(offsets + seq + 1) - first
    if length == 0:
        return
    start = tl.load(seq_starts + seq)
    blocks = table + seq * table_width
    row = tl.arange(0, STATE)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    state = _recalled_head(memory, blocks, start, head, heads, row, column, state_dim, head_dim, BLOCK_SIZE)
    fading = tl.load(rate + head).to(tl.float32)
    more = tl.load(bias + head).to(tl.float32)
    past = tl.load(skip + head).to(tl.float32)
    of_x, of_b = head * head_dim, heads * head_dim + head // share * state_dim
    of_c = of_b + groups * state_dim
    width = heads * head_dim + 2 * groups * state_dim
    b, c, x = _parts(xbc, first, True, width, of_b, of_c, of_x, row, column, state_dim, head_dim)
    d = _gate(dt, first, True, head, heads)
    for n in range(length):
        then, there = first + n + 1, n + 1 < length
        next_b, next_c, next_x = _parts(
            xbc, then, there, width, of_b, of_c, of_x, row, column, state_dim, head_dim
        )  # fmt: skip
        next_d = _gate(dt, then, there, head, heads)
        step = _softplus(d.to(tl.float32) + more)
        own = x.to(tl.float32)
        state = state * tl.exp(fading * step) + b.to(tl.float32)[:, None] * (step * own)[None, :]
        result = tl.sum(c.to(tl.float32)[:, None] * state, axis=0) + past * own
        at = y + ((first + n).to(tl.int64) * heads + head) * head_dim + column
        put(at, result, column < head_dim)
        _leave_head(
            memory, blocks, state, start + n + 1, n + 1 == length, head, heads, row, column, state_dim, head_dim,
            BLOCK_SIZE,
        )  # fmt: skip
        b, c, x, d = next_b, next_c, next_x, next_d
