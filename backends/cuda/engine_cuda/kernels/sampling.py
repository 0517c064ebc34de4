"""The next token: the greatest of logit + noise, without a sort, and the log-probabilities that are asked for."""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def philox_word(group, position, branch, key_low, key_high, lane):
    """Word ``lane`` of Philox4x32-10 with counter (group, position, branch, 0)."""
    c0 = group
    c1 = position + tl.zeros_like(group)
    c2 = branch + tl.zeros_like(group)
    c3 = tl.zeros_like(group)
    k0 = key_low + tl.zeros_like(group)
    k1 = key_high + tl.zeros_like(group)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53 + tl.zeros_like(group))
        low0 = c0 * (0xD2511F53 + tl.zeros_like(group))
        high1 = tl.umulhi(c2, 0xCD9E8D57 + tl.zeros_like(group))
        low1 = c2 * (0xCD9E8D57 + tl.zeros_like(group))
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))


@triton.jit
def _gumbel(n, position, branch, key_low, key_high):
    """-log(-log u) of tokens n, f64: u has 25 bits and its logarithm is taken of the exact value."""
    word = philox_word((n // 4).to(tl.uint32), position, branch, key_low, key_high, n % 4)
    u = (word >> 8).to(tl.float64) * 5.9604644775390625e-08 + 2.98023223876953125e-08
    return -tl.log(-tl.log(u))


@triton.jit
def best_of_parts(
    processed, logits, rows, positions, temperatures, seeds, branches, part_best, part_id, part_bad,
    width, parts, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a part of a row: the greatest score and its lowest id, and whether a raw logit is NaN or +inf."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    n = part * BLOCK + tl.arange(0, BLOCK)
    there = n < width
    place = row.to(tl.int64) * width + n
    values = tl.load(processed + place, mask=there, other=float("-inf"))
    finite = tl.abs(values) < INFINITY
    scores = values.to(tl.float64)
    if tl.load(temperatures + row) != 0:
        position = (tl.load(positions + tl.load(rows + row)) + 1).to(tl.uint32)
        seed_low, seed_high = tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1)
        scores += _gumbel(n, position, tl.load(branches + row), seed_low, seed_high)
    scores = tl.where(finite, scores, float("-inf"))
    best = tl.max(scores, axis=0)
    raw = tl.load(logits + place, mask=there, other=0).to(tl.float32)
    bad = tl.max(((raw != raw) | (raw == INFINITY)).to(tl.int32), axis=0)
    tl.store(part_best + row * parts + part, best)
    tl.store(part_id + row * parts + part, tl.min(tl.where(finite & (scores == best), n, width), axis=0))
    tl.store(part_bad + row * parts + part, bad)


@triton.jit(do_not_specialize=["count"])
def choose(
    part_best, part_id, part_bad, rows, positions, token_seq, seq_slots, targets, history, tokens, status,
    count, parts, width, length, TARGETS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A row's token and status, and the token into the history where the row is the last of its sequence."""
    row = tl.program_id(0)
    n = tl.arange(0, PARTS)
    there = n < parts
    scores = tl.load(part_best + row * parts + n, mask=there, other=float("-inf"))
    ids = tl.load(part_id + row * parts + n, mask=there, other=width)
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, ids, width), axis=0)
    state = tl.where(token < width, 0, 2)
    if TARGETS:
        target = tl.load(targets + row)
        state = tl.where(target >= 0, 0, state)
        token = tl.where(target >= 0, target, token)
    state = tl.where(tl.max(tl.load(part_bad + row * parts + n, mask=there, other=0), axis=0) > 0, 1, state)
    token = tl.where(state == 0, token, 0)
    tl.store(tokens + row, token)
    tl.store(status + row, state)
    at = tl.load(rows + row)
    seq = tl.load(token_seq + at)
    after = tl.load(token_seq + at + 1, mask=at + 1 < count, other=-1)
    position = tl.load(positions + at) + 1
    if (after != seq) & (position < length):
        tl.store(history + tl.load(seq_slots + seq).to(tl.int64) * length + position, token)


@triton.jit(do_not_specialize=["count"])
def wants(status, want_logprobs, candidates, active, count, BEAMS: tl.constexpr, BLOCK: tl.constexpr):
    """1 for rows that want log-probabilities, as log_sum reads it."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < count
    wanted = tl.load(want_logprobs + row, mask=there, other=-1) >= 0
    if BEAMS:
        wanted = wanted & (tl.load(candidates + row, mask=there, other=0) <= 0)
    good = tl.load(status + row, mask=there, other=1) == 0
    tl.store(active + row, (wanted & good).to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["columns"])
def report(
    logits, processed, sums, active, status, tokens, want_logprobs, candidates, logprob, top_ids, top_logprobs,
    width, columns, BEAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's log-probability and best tokens, one pass a token; what is not wanted is id -1 and 0."""
    row = tl.program_id(0)
    wanted = tl.load(want_logprobs + row)
    start = row.to(tl.int64) * width
    greatest = tl.zeros([], tl.float64)
    log_total = tl.zeros([], tl.float64)
    shown = tl.load(active + row)
    beams = 0
    if BEAMS:
        beams = tl.load(candidates + row)
        if tl.load(status + row) != 0:
            beams = 0
    chosen = tl.zeros([], tl.float32)
    if shown > 0:
        greatest, log_total = tl.load(sums + 2 * row), tl.load(sums + 2 * row + 1)
        logit = tl.load(logits + start + tl.load(tokens + row)).to(tl.float32)
        chosen = (logit.to(tl.float64) - greatest - log_total).to(tl.float32)
    tl.store(logprob + row, chosen)
    found = tl.where(shown > 0, wanted, 0)
    if BEAMS:
        if beams > 0:
            found = beams
            shown = 1
    found = tl.where(shown > 0, tl.minimum(found, columns), 0)
    before = tl.full([], float("inf"), tl.float32)
    before_id = tl.full([], -1, tl.int32)
    for column in range(columns):
        result = tl.zeros([], tl.float32)
        token = tl.full([], -1, tl.int32)
        if column < found:
            best = tl.full([], float("-inf"), tl.float32)
            token += width + 1
            for first in range(0, width, BLOCK):
                n = first + tl.arange(0, BLOCK)
                values = tl.load(logits + start + n, mask=n < width, other=float("-inf")).to(tl.float32)
                if BEAMS:
                    if beams > 0:
                        values = tl.load(processed + start + n, mask=n < width, other=float("-inf"))
                open_ = (n < width) & ((values < before) | ((values == before) & (n > before_id)))
                if BEAMS:
                    open_ = open_ & ((beams <= 0) | (tl.abs(values) < INFINITY))
                most = tl.max(tl.where(open_, values, float("-inf")), axis=0)
                own = tl.min(tl.where(open_ & (values == most), n, width), axis=0)
                token = tl.where((own < width) & ((most > best) | (token == width)), own, token)
                best = tl.maximum(best, most)
            before, before_id = best, token
            result = tl.where(beams > 0, best, (best.to(tl.float64) - greatest - log_total).to(tl.float32))
            result = tl.where(token == width, 0.0, result)
            token = tl.where(token == width, -1, token)
        tl.store(top_ids + row.to(tl.int64) * columns + column, token)
        tl.store(top_logprobs + row.to(tl.int64) * columns + column, result)
