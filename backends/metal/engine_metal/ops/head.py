"""The end of a step: process_logits and sample. Sampling parameters come with the step, so the host may look at them: what no
row asks for is left out."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..operands import Operands
from .order import best_first, descending_keys, index_of
from .philox import gumbel

OK, NON_FINITE, FULLY_MASKED = 0, 1, 2


def process_logits(o: Operands) -> tuple[mx.array, ...]:
    values = o.wide("logits")
    if o.has("candidates") and (o.on_host("candidates") > 0).any():
        values = mx.where(o["candidates"][:, None] > 0, log_softmax(values), values)
    if o.dims.B:
        counts = np.diff(o.on_host("bias_offsets"))
        rows = mx.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        values = values.at[rows, o["bias_ids"]].add(o["bias_values"])
    if (o.on_host("mask_rows") >= 0).any():
        values = _masked(o, values)
    values = _penalized(o, values)
    temperature = o["temperature"][:, None]
    if (o.on_host("temperature") == 0).all():
        return (values,)
    hot = temperature != 0
    return (mx.where(hot, _narrowed(o, values / mx.where(hot, temperature, 1)), values),)


def _masked(o: Operands, values: mx.array) -> mx.array:
    token = mx.arange(values.shape[1], dtype=mx.uint32)
    masks = o["masks"][mx.maximum(o["mask_rows"], 0)]
    allowed = masks[:, token // 32] >> token % 32 & 1
    return mx.where((allowed == 0) & (o["mask_rows"] >= 0)[:, None], -mx.inf, values)


# -- what history says ---------------------------------------------------------------------------------------------------


def _penalized(o: Operands, values: mx.array) -> mx.array:
    repetition = (o.on_host("repetition_penalty") != 1).any()
    sizes = sorted(set(o.on_host("no_repeat_ngram_size").tolist()) - {0}) if o.has("no_repeat_ngram_size") else []
    output = (o.on_host("frequency_penalty") != 0).any() or (o.on_host("presence_penalty") != 0).any()
    if not (repetition or sizes or output):
        return values
    rows = o["rows"]
    past = o.state("history")[o["seq_slots"][o["token_seq"][rows]]]
    index, last = mx.arange(past.shape[1]), o["positions"][rows][:, None]
    if repetition:
        seen = _counts(values, past, index <= last) > 0
        penalty = o["repetition_penalty"][:, None]
        values = mx.where(seen, mx.where(values > 0, values / penalty, values * penalty), values)
    for size in sizes:
        wanted = (o["no_repeat_ngram_size"] == size)[:, None]
        values = mx.where((_completing(values, past, last, size) > 0) & wanted, -mx.inf, values)
    if output:
        counts = _counts(values, past, (index <= last) & (index >= o["prompt_lengths"][:, None]))
        less = o["frequency_penalty"][:, None] * counts.astype(mx.float32) + o["presence_penalty"][:, None]
        values = mx.where(counts > 0, values - less, values)
    return values


def _counts(values: mx.array, tokens: mx.array, counted: mx.array) -> mx.array:
    """How often each token is among those ``counted`` of a row: i32, the shape of values."""
    rows = mx.arange(len(values))[:, None]
    # What is not counted may be any number, and MLX writes wherever an index says.
    found = mx.zeros(values.shape, mx.int32)
    return found.at[rows, mx.where(counted, tokens, 0)].add(counted.astype(mx.int32))


def _completing(values: mx.array, past: mx.array, last: mx.array, size: int) -> mx.array:
    """Counts of the tokens that would complete an n-gram of the past once more."""
    windows = past.shape[1] - size + 1
    if windows < 1:
        return mx.zeros(values.shape, mx.int32)
    same = mx.arange(windows) + size - 1 <= last
    for n in range(size - 1):
        tail = mx.take_along_axis(past, mx.maximum(last - size + 2 + n, 0), axis=1)
        same = same & (past[:, n : n + windows] == tail)
    return _counts(values, past[:, size - 1 :], same)


# -- what is kept of the distribution --------------------------------------------------------------------------------------


def _narrowed(o: Operands, values: mx.array) -> mx.array:
    top_k, top_p, min_p = (o.on_host(name) for name in ("top_k", "top_p", "min_p"))
    if (top_k > 0).any() or (top_p < 1).any():
        values = _top(o, values)
    if (min_p > 0).any():
        best = _finite(values).max(axis=-1, keepdims=True)
        values = mx.where(mx.exp(values - best) < o["min_p"][:, None], -mx.inf, values)
    if o.has("typical_p") and (o.on_host("typical_p") < 1).any():
        values = _typical(values, o["typical_p"][:, None])
    return values


def _finite(values: mx.array) -> mx.array:
    """Minus infinity in place of whatever is no finite number."""
    return mx.where(mx.isfinite(values), values, -mx.inf)


def _top(o: Operands, values: mx.array) -> mx.array:
    """Top-k, then top-p of what it leaves, both from one sort: what they keep are the first of it."""
    width = values.shape[1]
    keys = descending_keys(_finite(values))
    order = mx.sort(keys, axis=-1)
    k, p = o["top_k"][:, None], o["top_p"][:, None]
    count = mx.where(k > 0, mx.minimum(k, width), width)
    ranked = mx.take_along_axis(_finite(values), index_of(order), axis=-1)
    weights = mx.where(mx.arange(width) < count, mx.exp(ranked - ranked[:, :1]), 0)
    sums = mx.cumsum(weights / weights.sum(axis=-1, keepdims=True), axis=-1)
    nucleus = 1 + (sums < p).sum(axis=-1, keepdims=True)
    count = mx.where(p < 1, mx.minimum(count, nucleus), count)
    worst = mx.take_along_axis(order, count - 1, axis=-1)
    return mx.where(mx.isfinite(values) & (keys > worst), -mx.inf, values)


def _typical(values: mx.array, p: mx.array) -> mx.array:
    left = mx.isfinite(values)
    # -log p - entropy is a logit's distance from the mean logit.
    logits = mx.where(left, values - _finite(values).max(axis=-1, keepdims=True), 0)
    weights = mx.where(left, mx.exp(logits), 0)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    distances = mx.where(left, mx.abs(logits - (weights * logits).sum(axis=-1, keepdims=True)), mx.inf)
    order = best_first(-distances)
    sums = mx.cumsum(mx.take_along_axis(weights, order, axis=-1), axis=-1)
    most = left.sum(axis=-1, keepdims=True) - 1
    last = mx.maximum(mx.minimum((sums < p).sum(axis=-1, keepdims=True), most), 0)
    bound = mx.take_along_axis(distances, mx.take_along_axis(order, last, axis=-1), axis=-1)
    return mx.where((p < 1) & left & (distances > bound), -mx.inf, values)


def log_softmax(values: mx.array) -> mx.array:
    """Shifted first: the logarithm of a sum beside large logits would lose its last digits."""
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - mx.log(mx.exp(shifted).sum(axis=-1, keepdims=True))


# -- the token -------------------------------------------------------------------------------------------------------------


def sample(o: Operands) -> tuple[mx.array, ...]:
    raw, processed = o.wide("logits"), o.wide("processed")
    rows = o["rows"]
    sequences, positions = o["token_seq"][rows], o["positions"][rows] + 1
    beams = o["candidates"] if o.has("candidates") else mx.zeros_like(rows)
    targets = o["targets"] if o.has("targets") else mx.full(rows.shape, -1, mx.int32)
    bad = (mx.isnan(raw) | (raw == mx.inf)).any(axis=-1)
    masked = ~mx.isfinite(processed).any(axis=-1) & (targets < 0)
    status = mx.where(bad, NON_FINITE, mx.where(masked, FULLY_MASKED, OK))
    chosen = mx.where(targets >= 0, targets, _chosen(o, _finite(processed), positions))
    tokens = mx.where(status == OK, chosen, 0)
    _remember(o, sequences, positions, tokens)
    logprob, ids, logprobs = _best(o, raw, _finite(processed), tokens, mx.where(status == OK, beams, 0), status == OK)
    return tokens, status, logprob, ids, logprobs


def _chosen(o: Operands, scores: mx.array, positions: mx.array) -> mx.array:
    if (o.on_host("temperature") != 0).any():
        noise = gumbel(o["seeds"], positions, o["branches"], scores.shape[1])
        scores = mx.where(o["temperature"][:, None] != 0, scores + noise, scores)
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def _remember(o: Operands, sequences: mx.array, positions: mx.array, tokens: mx.array) -> None:
    """Where a row is not the last of its sequence, or history is full, what is there is written back."""
    history, rows, token_seq = o.state("history"), o["rows"], o["token_seq"]
    after = mx.minimum(rows + 1, len(token_seq) - 1)
    last = (rows + 1 == len(token_seq)) | (token_seq[after] != sequences)
    place = o["seq_slots"][sequences], mx.minimum(positions, history.shape[1] - 1)
    history[place] = mx.where(last & (positions < history.shape[1]), tokens, history[place])
    o.put_state("history", history)


def _best(
    o: Operands, raw: mx.array, processed: mx.array, tokens: mx.array, beams: mx.array, good: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """The token's logprob, and ids and logprobs (of beams the processed values) of the best, as many as are wanted."""
    rows, width = len(raw), o.dims.K
    none = mx.full((rows, width), -1, mx.int32), mx.zeros((rows, width))
    wanted = mx.where((beams > 0) | ~good, -1, o["want_logprobs"])
    logprob = mx.zeros(rows)
    found = none
    if (o.on_host("want_logprobs") >= 0).any():
        logprobs = log_softmax(raw)
        own = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        logprob = mx.where(wanted >= 0, own, 0)
        # The order is that of the logits: those of a row without NaN are told apart better than their logprobs.
        found = _first(found, mx.where(good[:, None], raw, 0), logprobs, wanted)
    if o.has("candidates") and (o.on_host("candidates") > 0).any():
        finite = (processed > -mx.inf).sum(axis=-1)
        found = _first(found, processed, processed, mx.minimum(beams, finite))
    return logprob, *found


def _first(
    found: tuple[mx.array, mx.array], order: mx.array, values: mx.array, wanted: mx.array
) -> tuple[mx.array, mx.array]:
    """``found`` with ids and values of the ``wanted`` best, where there are any."""
    width = found[0].shape[1]
    ids = best_first(order)[:, :width].astype(mx.int32)
    best = mx.take_along_axis(values, ids, axis=-1)
    short = [(0, 0), (0, width - ids.shape[1])]
    take = mx.arange(width) < wanted[:, None]
    return mx.where(take, mx.pad(ids, short), found[0]), mx.where(take, mx.pad(best, short), found[1])
