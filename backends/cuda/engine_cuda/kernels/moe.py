"""Mixture of experts: the choice, the order of choices by expert, and the weighted sum."""

import triton
import triton.language as tl

from .common import put


@triton.jit
def _best(choice, columns, SIZE: tl.constexpr):
    """The greatest value's index, the lowest of equals."""
    most = tl.max(choice, axis=0)
    return tl.min(tl.where(choice == most, columns, SIZE), axis=0)


@triton.jit
def _of_best_groups(choice, group, experts, groups, groups_kept, group_best, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Minus infinity in place of what the experts outside the best groups have."""
    names = tl.arange(0, GROUPS)
    columns = tl.arange(0, SIZE)
    totals = tl.where(names < groups, tl.zeros([GROUPS], tl.float64), float("-inf"))
    for g in range(groups):
        own = tl.where(group == g, choice, float("-inf"))
        for _ in range(group_best):
            at = _best(own, columns, SIZE)
            value = tl.sum(tl.where(columns == at, own, 0.0), axis=0)
            totals = tl.where(names == g, totals + value, totals)
            own = tl.where(columns == at, float("-inf"), own)
    kept = tl.zeros([SIZE], tl.int32)
    for _ in range(groups_kept):
        at = _best(totals, names, GROUPS)
        kept = tl.where(group == at, 1, kept)
        totals = tl.where(names == at, float("-inf"), totals)
    return tl.where(kept > 0, choice, float("-inf"))


@triton.jit
def route(
    logits, bias, own, ids, weights, experts, k, scale, groups, groups_kept, group_best,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr, RENORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A token a program, in f64: its experts are few, and near ties must be decided as anywhere else."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    there = columns < experts
    wide = tl.load(logits + token * experts + columns, mask=there, other=float("-inf")).to(tl.float64)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-wide))
    else:
        scores = tl.exp(wide - tl.max(wide, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = wide
    if BIASED or GROUPED:
        choice = scores
    if BIASED:
        choice = choice + tl.load(bias + columns, mask=there, other=0).to(tl.float64)
    choice = tl.where(there, choice, float("-inf"))
    if GROUPED:
        group = columns // (experts // groups)
        choice = _of_best_groups(choice, group, experts, groups, groups_kept, group_best, GROUPS, SIZE)
    taken = tl.zeros([SIZE], tl.int32)
    total = tl.zeros([], tl.float64)
    for n in range(k):
        # NaN loses every comparison; then the first that is left is chosen, and its weight stays NaN.
        open_ = there & (taken == 0)
        most = tl.max(tl.where(open_ & (choice == choice), choice, float("-inf")), axis=0)
        best = tl.min(tl.where(open_ & (choice == most), columns, SIZE), axis=0)
        best = tl.where(best == SIZE, tl.min(tl.where(open_, columns, SIZE), axis=0), best)
        taken = tl.where(columns == best, 1, taken)
        total += tl.sum(tl.where(columns == best, scores, 0.0), axis=0)
        tl.store(ids + token * k + n, best)
    if not RENORMALIZED:
        total = total * 0 + 1
    tl.debug_barrier()
    for n in range(k):
        best = tl.load(ids + token * k + n)
        score = tl.sum(tl.where(columns == best, scores, 0.0), axis=0)
        if SCALED:
            score = score * tl.load(own + best).to(tl.float64)
        tl.store(weights + token * k + n, (score / total * scale).to(tl.float32))


@triton.jit(do_not_specialize=["total"])
def count_choices(ids, counts, total, BLOCK: tl.constexpr):
    """How many choices fell on the program's expert."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, total, BLOCK):
        n = first + tl.arange(0, BLOCK)
        found += (tl.load(ids + n, mask=n < total, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["total", "blocks"])
def order_choices(
    ids, counts, order, block_experts, total, experts, blocks,
    BM: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The program's expert's choices, in ascending order, in blocks of BM of their own. The program after the last expert marks
    the blocks that are left."""
    expert = tl.program_id(0)
    names = tl.arange(0, EXPERTS)
    needed = (tl.load(counts + names, mask=names < experts, other=0) + BM - 1) // BM
    block = tl.sum(tl.where(names < expert, needed, 0), axis=0)
    if expert == experts:
        for spare in range(block, blocks):
            tl.store(block_experts + spare, -1)
    else:
        mine = tl.load(counts + expert)
        for own in range((mine + BM - 1) // BM):
            tl.store(block_experts + block + own, expert)
        done = 0
        for first in range(0, total, BLOCK):
            n = first + tl.arange(0, BLOCK)
            chosen = tl.load(ids + n, mask=n < total, other=-1) == expert
            rank = done + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            tl.store(order + block * BM + rank, n, mask=chosen)
            done += tl.sum(chosen.to(tl.int32), axis=0)
        tail = mine + tl.arange(0, BM)
        tl.store(order + block * BM + tail, tl.full([BM], -1, tl.int32), mask=tail < (mine + BM - 1) // BM * BM)


@triton.jit
def combine(y, weights, total, k, width, BLOCK: tl.constexpr):
    """A token's choices of y [T * k, width] times their weights, in the order of choice."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = columns < width
    summed = tl.zeros([BLOCK], tl.float32)
    for n in range(k):
        weight = tl.load(weights + token * k + n).to(tl.float32)
        summed += weight * tl.load(y + (token * k + n) * width + columns, mask=kept, other=0).to(tl.float32)
    put(total + token * width + columns, summed, kept)
