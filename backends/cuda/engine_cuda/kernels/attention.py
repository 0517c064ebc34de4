"""Attention over the paged cache: one kernel for prefill and decode, and one that merges the parts of long contexts.

A program has a block of tokens of one sequence with all query heads of one KV head (of a large group a chunk), so that keys
and values are read once for them. Sequences with a single token are cut into parts of SPLIT cached tokens (DECODE), at first into
SHORT shorter ones of FIRST, since few short contexts would leave multiprocessors idle; the others are not cut.
"""

import triton
import triton.language as tl

from .common import enter, from_e4m3, put

LOG2E = tl.constexpr(1.4426950408889634)
SHORT = tl.constexpr(4)
"""Parts of a context that may be shorter than the others."""


@triton.jit
def begin_of(split, FIRST: tl.constexpr, SPLIT: tl.constexpr):
    """The first cached token of a part."""
    return tl.minimum(split, SHORT) * FIRST + tl.maximum(split - SHORT, 0) * SPLIT


@triton.jit
def _part_of(token, FIRST: tl.constexpr, SPLIT: tl.constexpr):
    """The part that has a cached token."""
    return tl.minimum(token // FIRST, SHORT) + tl.maximum(token - SHORT * FIRST, 0) // SPLIT


@triton.jit
def _block_of(offsets, sequences, block, BQ: tl.constexpr):
    """The sequence of a block of BQ tokens: sequence s has blocks offsets[s] // BQ + s and those that follow."""
    low = 0
    high = sequences
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(offsets + middle) // BQ + middle <= block:
            low = middle
        else:
            high = middle
    return low, (block - tl.load(offsets + low) // BQ - low) * BQ


@triton.jit
def _read(pointers, mask, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """What is cached, 0 where the mask says so; bytes are E4M3."""
    stored = tl.load(pointers, mask=mask, other=0)
    if pointers.dtype.element_ty == tl.uint8:
        return from_e4m3(stored, dtype, NATIVE)
    else:
        return stored.to(dtype)


@triton.jit
def softcapped(scores, cap):
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))


@triton.jit
def _scores_in_pieces(
    q_rows, k_rows, there, seen, width,
    DOT: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Queries times keys, PIECE columns of both at a time: no thread holds a whole query."""
    scores = tl.zeros([ROWS, BN], tl.float32)
    for first in range(0, width, PIECE):
        column = first + tl.arange(0, PIECE)
        inside = column < width
        queries = tl.load(q_rows[:, None] + column[None, :], mask=there[:, None] & inside[None, :], other=0).to(DOT)
        keys = _read(k_rows[:, None] + column[None, :], seen[:, None] & inside[None, :], DOT, NATIVE)
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
    return scores


@triton.jit(do_not_specialize=["sequences", "table_width", "splits"])
def attend(
    q, k, v, k_scale, v_scale, sinks, seq_starts, offsets, table, y, part_y, part_most, part_total,
    sequences, table_width, kv_heads, key_width, value_width, scale, softcap, window, splits,
    DECODE: tl.constexpr, WHOLE: tl.constexpr, LATENT: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, PIECE: tl.constexpr,
    AHEAD: tl.constexpr, CAUSAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of tokens (DECODE: sequences), CHUNKS of the query heads of each KV head, parts. With WHOLE there is one
    part, and y is written; else what the parts sum up to, for ``merge``. LATENT: values are the first value_width columns of
    keys, which have REST more. PIECE: columns of a product of queries and keys, or 0 for all of them. AHEAD: blocks are known a
    step before their keys are read, which else wait for them each time."""
    enter(EARLY)
    head = tl.program_id(1) // CHUNKS
    chunk = tl.program_id(1) % CHUNKS
    split = tl.program_id(2)
    if DECODE:
        seq = tl.program_id(0)
        token = 0
    else:
        seq, token = _block_of(offsets, sequences, tl.program_id(0), BQ)
    first = tl.load(offsets + seq)
    length = tl.load(offsets + seq + 1) - first
    start = tl.load(seq_starts + seq)
    if (token >= length) | ((length == 1) != DECODE):
        return
    last = tl.minimum(token + BQ, length)
    end = start + last
    if not CAUSAL:
        # What follows the block's tokens is seen, too: with a window as far as from the last of them.
        end = start + (tl.minimum(length, last - 1 + window) if WINDOWED else length)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, start + token + 1 - window)
    if not WHOLE:
        begin = tl.maximum(begin, begin_of(split, FIRST, SPLIT))
        end = tl.minimum(end, begin_of(split + 1, FIRST, SPLIT))
        if begin >= end:
            return

    row = tl.arange(0, BQ * GROUP_ROWS)
    query, member = token + row // GROUP_ROWS, chunk * GROUP_ROWS + row % GROUP_ROWS
    there = (query < length) & (member < GROUP)
    column = tl.arange(0, WIDTH)
    inside = column < value_width
    q_head = head * GROUP + member
    q_row = ((first + query).to(tl.int64) * kv_heads * GROUP + q_head) * key_width
    if PIECE == 0:
        queries = tl.load(q + q_row[:, None] + column[None, :], mask=there[:, None] & inside[None, :], other=0).to(DOT)
        if LATENT:
            more = value_width + tl.arange(0, REST)
            beyond = more < key_width
            others = tl.load(q + q_row[:, None] + more[None, :], mask=there[:, None] & beyond[None, :], other=0).to(DOT)

    most = tl.full([BQ * GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BQ * GROUP_ROWS], tl.float32)
    if SINKS and WHOLE:
        most = tl.load(sinks + q_head, mask=there, other=0).to(tl.float32) * LOG2E
        total += 1.0
    mixed = tl.zeros([BQ * GROUP_ROWS, WIDTH], tl.float32)
    blocks = table + seq * table_width
    if AHEAD:
        place = begin // BN * BN + tl.arange(0, BN)
        following = tl.load(blocks + place // BLOCK_SIZE, mask=(place >= begin) & (place < end), other=0)
    for n in range(begin // BN * BN, end, BN):
        place = n + tl.arange(0, BN)
        seen = (place >= begin) & (place < end)
        if AHEAD:
            block = following.to(tl.int64)
            following = tl.load(blocks + (place + BN) // BLOCK_SIZE, mask=place + BN < end, other=0)
        else:
            block = tl.load(blocks + place // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + place % BLOCK_SIZE) * kv_heads + head
        whole = seen[:, None] & inside[None, :]
        keys = _read(k + slot[:, None] * key_width + column[None, :], whole, DOT, NATIVE)
        if PIECE == 0:
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            if LATENT:
                rest = _read(
                    k + slot[:, None] * key_width + more[None, :], seen[:, None] & beyond[None, :], DOT, NATIVE
                )
                scores = tl.dot(others, tl.trans(rest), scores, input_precision=PRECISION)
        else:
            scores = _scores_in_pieces(
                q + q_row, k + slot * key_width, there, seen, key_width,
                DOT, PRECISION, NATIVE, BQ * GROUP_ROWS, BN, PIECE,
            )  # fmt: skip
        scores = scores * scale
        if SCALED:
            key_scales = tl.load(k_scale + slot, mask=seen, other=0)
            scores = scores * key_scales[None, :]
        if CAPPED:
            scores = softcapped(scores, softcap)
        position = start + query[:, None]
        visible = seen[None, :] & (place[None, :] <= position) if CAUSAL else seen[None, :]
        if WINDOWED:
            visible &= place[None, :] > position - window
            if not CAUSAL:
                visible &= place[None, :] < position + window
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - level[:, None])
        fading = tl.exp2(most - level)
        total = total * fading + tl.sum(shares, axis=1)
        mixed = mixed * fading[:, None]
        if LATENT:
            values = keys
            if SCALED:
                shares = shares * key_scales[None, :]
        else:
            values = _read(v + slot[:, None] * value_width + column[None, :], whole, DOT, NATIVE)
            if SCALED:
                shares = shares * tl.load(v_scale + slot, mask=seen, other=0)[None, :]
        mixed = tl.dot(shares.to(DOT), values, mixed, input_precision=PRECISION)
        most = higher

    y_row = (first + query).to(tl.int64) * kv_heads * GROUP + q_head
    kept = there[:, None] & inside[None, :]
    if WHOLE:
        put(y + y_row[:, None] * value_width + column[None, :], mixed / total[:, None], kept)
    else:
        part = (seq * kv_heads * GROUP + q_head).to(tl.int64) * splits + split
        tl.store(part_y + part[:, None] * value_width + column[None, :], mixed, mask=kept)
        tl.store(part_most + part, most, mask=there)
        tl.store(part_total + part, total, mask=there)


@triton.jit(do_not_specialize=["splits"])
def merge(
    part_y, part_most, part_total, sinks, seq_starts, offsets, y, heads, value_width, window, splits,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, FIRST: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one head of a sequence with one token, in their order."""
    enter(EARLY)
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(offsets + seq)
    if tl.load(offsets + seq + 1) - first != 1:
        return
    end = tl.load(seq_starts + seq) + 1
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, end - window)
    column = tl.arange(0, WIDTH)
    kept = column < value_width
    most = float("-inf")
    total = 0.0
    if SINKS:
        most = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = 1.0
    mixed = tl.zeros([WIDTH], tl.float32)
    for split in range(_part_of(begin, FIRST, SPLIT), _part_of(end - 1, FIRST, SPLIT) + 1):
        part = (seq * heads + head).to(tl.int64) * splits + split
        level = tl.load(part_most + part)
        higher = tl.maximum(most, level)
        fading = tl.exp2(most - higher)
        share = tl.exp2(level - higher)
        total = total * fading + tl.load(part_total + part) * share
        mixed = mixed * fading + tl.load(part_y + part * value_width + column, mask=kept, other=0) * share
        most = higher
    put(y + (first.to(tl.int64) * heads + head) * value_width + column, mixed / total, kept)
