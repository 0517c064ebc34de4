"""process_logits: adjustments token by token, then filters, each a threshold that is searched for instead of a sort.

A row's filters run in one program. What they keep is told by few numbers: the least value kept, the last id kept of the tokens
that have it, and for typical-p the greatest distance. So nothing is stored between them.
"""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
IN_PROMPT = tl.constexpr(-2147483648)


@triton.jit
def _order(x):
    """An i32 with the order of f32 numbers, -0 as 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def log_sum(logits, active, sums, width, BLOCK: tl.constexpr):
    """The greatest logit and log(sum(exp(logit - greatest))) of each row whose ``active`` is above 0: f64 [rows, 2]."""
    row = tl.program_id(0)
    if tl.load(active + row) > 0:
        start = logits + row.to(tl.int64) * width
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, width, BLOCK):
            n = first + tl.arange(0, BLOCK)
            most = tl.maximum(most, tl.load(start + n, mask=n < width, other=float("-inf")).to(tl.float32))
        greatest = tl.max(most, axis=0)
        total = tl.zeros([BLOCK], tl.float64)
        for first in range(0, width, BLOCK):
            n = first + tl.arange(0, BLOCK)
            values = tl.load(start + n, mask=n < width, other=float("-inf")).to(tl.float32)
            total += tl.exp(values.to(tl.float64) - greatest)
        tl.store(sums + 2 * row, greatest.to(tl.float64))
        tl.store(sums + 2 * row + 1, tl.log(tl.sum(total, axis=0)))


@triton.jit
def _penalized(repetition, frequency, presence, row):
    return (tl.load(repetition + row) != 1) | (tl.load(frequency + row) != 0) | (tl.load(presence + row) != 0)


@triton.jit
def clear_counts(repetition, frequency, presence, counts, width, BLOCK: tl.constexpr):
    """Zeros in counts i32 [rows, width] where a row has penalties, a part of a row a program: hardly any has, and there are as
    many numbers as logits."""
    row = tl.program_id(0)
    if _penalized(repetition, frequency, presence, row):
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(counts + row.to(tl.int64) * width + n, tl.zeros([BLOCK], tl.int32), mask=n < width)


@triton.jit
def count_tokens(
    history, rows, positions, token_seq, seq_slots, prompt_lengths, repetition, frequency, presence, counts,
    length, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts i32 [rows, width], zeros before: how often each token comes after the prompt, with the highest bit set where it is
    in the prompt. Rows without penalties are left out."""
    row = tl.program_id(0)
    if _penalized(repetition, frequency, presence, row):
        token = tl.load(rows + row)
        last = tl.load(positions + token)
        past = history + tl.load(seq_slots + tl.load(token_seq + token)).to(tl.int64) * length
        prompt = tl.load(prompt_lengths + row)
        own = counts + row.to(tl.int64) * width
        for first in range(0, last + 1, BLOCK):
            n = first + tl.arange(0, BLOCK)
            there = n <= last
            found = tl.load(past + n, mask=there, other=0)
            tl.atomic_or(own + found, IN_PROMPT, mask=there & (n < prompt))
            tl.atomic_add(own + found, 1, mask=there & (n >= prompt))


@triton.jit
def adjust(
    logits, processed, sums, counts, candidates, bias_offsets, bias_ids, bias_values, mask_rows, masks,
    repetition, frequency, presence, width, mask_width, BEAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-softmax of beams, biases, masks and penalties, a part of a row a program."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < width
    place = row.to(tl.int64) * width + n
    values = tl.load(logits + place, mask=there, other=0).to(tl.float32)
    if BEAMS:
        if tl.load(candidates + row) > 0:
            wide = values.to(tl.float64) - tl.load(sums + 2 * row) - tl.load(sums + 2 * row + 1)
            values = wide.to(tl.float32)
    for entry in range(tl.load(bias_offsets + row), tl.load(bias_offsets + row + 1)):
        chosen = n == tl.load(bias_ids + entry)
        values = tl.where(chosen, values + tl.load(bias_values + entry), values)
    mask_row = tl.load(mask_rows + row)
    if mask_row >= 0:
        words = tl.load(masks + mask_row.to(tl.int64) * mask_width + n // 32, mask=there, other=0)
        allowed = ((words >> (n % 32).to(tl.uint32)) & 1) != 0
        values = tl.where(allowed, values, float("-inf"))
    if _penalized(repetition, frequency, presence, row):
        found = tl.load(counts + place, mask=there, other=0)
        penalty = tl.load(repetition + row)
        changed = tl.where(values > 0, tl.div_rn(values, penalty + tl.zeros_like(values)), values * penalty)
        values = tl.where(found != 0, changed, values)
        count = found & ~IN_PROMPT
        less = tl.load(frequency + row) * count.to(tl.float32) + tl.load(presence + row)
        values = tl.where(count > 0, values - less, values)
    tl.store(processed + place, values, mask=there)


@triton.jit
def ban_ngrams(
    history, rows, positions, token_seq, seq_slots, sizes, processed, length, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Minus infinity for tokens that would complete an n-gram of the history once more."""
    row = tl.program_id(0)
    token = tl.load(rows + row)
    count = tl.load(positions + token) + 1
    size = tl.load(sizes + row)
    if (size > 0) & (size <= count):
        past = history + tl.load(seq_slots + tl.load(token_seq + token)).to(tl.int64) * length
        for first in range(0, count - size + 1, BLOCK):
            n = first + tl.arange(0, BLOCK)
            same = n <= count - size
            for back in range(size - 1):
                same &= tl.load(past + n + back, mask=same, other=-1) == tl.load(past + count + 1 - size + back)
            found = tl.load(past + n + size - 1, mask=same, other=0)
            lowest = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(processed + row.to(tl.int64) * width + found, lowest, mask=same)


@triton.jit
def _load(start, n, width, temperature):
    """Values after the temperature; what is beyond the row or no number, as minus infinity."""
    values = tl.load(start + n, mask=n < width, other=float("-inf"))
    return tl.div_rn(values, temperature + tl.zeros_like(values))


@triton.jit
def _kept(values, n, least, last):
    """Finite values above ``least``, or equal to it with an id up to ``last``, in the order of _order."""
    key = _order(values)
    return (tl.abs(values) < INFINITY) & ((key > least) | ((key == least) & (n <= last)))


@triton.jit
def _weight_above(start, width, temperature, least, last, level, bound, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    """Of the values kept and greater than ``bound``: how many there are, or the sum of exp(value - level). Each place of a block
    has a sum of its own, so that the program's warps wait for each other only once."""
    total = tl.zeros([BLOCK], tl.int32 if COUNTED else tl.float64)
    for first in range(0, width, BLOCK):
        n = first + tl.arange(0, BLOCK)
        values = _load(start, n, width, temperature)
        chosen = _kept(values, n, least, last) & (_order(values) > bound)
        if COUNTED:
            total += chosen.to(tl.int32)
        else:
            total += tl.where(chosen, tl.exp(values - level), 0.0).to(tl.float64)
    return tl.sum(total, axis=0).to(tl.float64)


@triton.jit
def _cut(start, width, temperature, least, last, level, wanted, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    """The shortest prefix of the kept values, in descending order and by id, that weighs ``wanted`` or more: the least value of
    it and the last id of those that have it."""
    # The smallest bound for which what is greater weighs less than wanted, by halving.
    low = tl.full([], -2147483648, tl.int64)
    high = tl.full([], 2147483647, tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        above = _weight_above(start, width, temperature, least, last, level, middle.to(tl.int32), BLOCK, COUNTED)
        if above < wanted:
            high = middle
        else:
            low = middle + 1
    bound = low.to(tl.int32)
    before = _weight_above(start, width, temperature, least, last, level, bound, BLOCK, COUNTED)
    end = tl.full([], -1, tl.int32)
    for first in range(0, width, BLOCK):
        n = first + tl.arange(0, BLOCK)
        values = _load(start, n, width, temperature)
        equal = _kept(values, n, least, last) & (_order(values) == bound)
        if COUNTED:
            weights = equal.to(tl.int32).to(tl.float64)
        else:
            weights = tl.where(equal, tl.exp(values - level), 0.0).to(tl.float64)
        # What comes before each of the equals.
        sums = before + tl.cumsum(weights, axis=0) - weights
        end = tl.maximum(end, tl.max(tl.where(equal & (sums < wanted), n, -1), axis=0))
        before += tl.sum(weights, axis=0)
    return bound, end


@triton.jit
def _mean(start, width, temperature, least, last, floor, level, BLOCK: tl.constexpr):
    """The sum of weights exp(value - level) of what is kept and at least ``floor``, and the weighted mean of value - level."""
    totals = tl.zeros([BLOCK], tl.float64)
    mixed = tl.zeros([BLOCK], tl.float64)
    for first in range(0, width, BLOCK):
        n = first + tl.arange(0, BLOCK)
        values = _load(start, n, width, temperature)
        chosen = _kept(values, n, least, last) & (values >= floor)
        distance = tl.where(chosen, values - level, 0.0).to(tl.float64)
        weights = tl.where(chosen, tl.exp(distance), 0.0)
        totals += weights
        mixed += weights * distance
    total = tl.sum(totals, axis=0)
    return total, tl.sum(mixed, axis=0) / total


@triton.jit
def _typical(start, width, temperature, least, last, floor, level, p, BLOCK: tl.constexpr):
    """The mean of value - level, and the least distance from it within which the weights reach p."""
    total, mean = _mean(start, width, temperature, least, last, floor, level, BLOCK)
    low = tl.full([], 0, tl.int64)
    high = tl.full([], 0x7FEFFFFFFFFFFFFF, tl.int64)
    while low < high:
        middle = low + (high - low) // 2
        reach = middle.to(tl.float64, bitcast=True)
        within = tl.zeros([BLOCK], tl.float64)
        for first in range(0, width, BLOCK):
            n = first + tl.arange(0, BLOCK)
            values = _load(start, n, width, temperature)
            chosen = _kept(values, n, least, last) & (values >= floor)
            distance = tl.where(chosen, values - level, 0.0).to(tl.float64)
            near = chosen & (tl.abs(distance - mean) <= reach)
            within += tl.where(near, tl.exp(distance), 0.0)
        if tl.sum(within, axis=0) >= p * total:
            high = middle
        else:
            low = middle + 1
    return mean, low.to(tl.float64, bitcast=True)


@triton.jit
def keep(
    processed, temperatures, top_k, top_p, min_p, typical_p, width, TYPICAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Temperature, top-k, top-p, min-p and typical-p in a row's place; at temperature 0 nothing is done."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    if temperature != 0:
        start = processed + row.to(tl.int64) * width
        levels = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, width, BLOCK):
            values = _load(start, first + tl.arange(0, BLOCK), width, temperature)
            levels = tl.maximum(levels, tl.where(tl.abs(values) < INFINITY, values, float("-inf")))
        level = tl.max(levels, axis=0)
        least = tl.full([], -2147483648, tl.int32)
        last = tl.full([], 2147483647, tl.int32)
        some = level > float("-inf")
        count = tl.load(top_k + row)
        if some & (count > 0) & (count < width):
            least, last = _cut(start, width, temperature, least, last, level, count.to(tl.float64), BLOCK, True)
        p = tl.load(top_p + row)
        if some & (p < 1):
            total = _weight_above(start, width, temperature, least, last, level, -2147483647, BLOCK, False)
            wanted = tl.maximum(p.to(tl.float64) * total, 1e-300)
            least, last = _cut(start, width, temperature, least, last, level, wanted, BLOCK, False)
        share = tl.load(min_p + row).to(tl.float64)
        floor = tl.full([], float("-inf"), tl.float32)
        mean = tl.zeros([], tl.float64)
        reach = tl.full([], float("inf"), tl.float64)
        limit = tl.full([], 1.0, tl.float32)
        if TYPICAL:
            limit = tl.load(typical_p + row)
        if some & (share > 0):
            # The least value that stays, since what follows compares values.
            floors = tl.full([BLOCK], float("-inf"), tl.float32)
            for first in range(0, width, BLOCK):
                values = _load(start, first + tl.arange(0, BLOCK), width, temperature)
                gone = (tl.abs(values) < INFINITY) & (tl.exp(values.to(tl.float64) - level) < share)
                floors = tl.maximum(floors, tl.where(gone, values, float("-inf")))
            floor = tl.max(floors, axis=0)
        if TYPICAL:
            if some & (limit < 1):
                above = tl.where(floor == float("-inf"), floor, _next(floor))
                mean, reach = _typical(
                    start, width, temperature, least, last, above, level, limit.to(tl.float64), BLOCK
                )
        unfiltered = (count <= 0) & (p >= 1) & (share <= 0) & (limit >= 1)
        for first in range(0, width, BLOCK):
            n = first + tl.arange(0, BLOCK)
            values = _load(start, n, width, temperature)
            distance = tl.where(tl.abs(values) < INFINITY, values - level, 0.0).to(tl.float64)
            stays = (_kept(values, n, least, last) & (values > floor) & (tl.abs(distance - mean) <= reach)) | (
                tl.abs(values) == INFINITY
            )
            stays = stays | (values != values) | unfiltered | (some == 0)
            tl.store(start + n, tl.where(stays, values, float("-inf")), mask=n < width)


@triton.jit
def _next(x):
    """The next f32 above a finite one."""
    bits = x.to(tl.int32, bitcast=True)
    up = tl.where(bits >= 0, bits + 1, tl.where(bits == -2147483648, 1, bits - 1))
    return up.to(tl.float32, bitcast=True)
