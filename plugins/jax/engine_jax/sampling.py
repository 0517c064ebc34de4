"""The end of a step: logits processed and a token chosen, on the device. What no row asks for is not computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp

from engine.backend.v1 import Call, Frame, StepFn

from .given import Op
from .philox import gumbel

_NONE = -jnp.inf
_OK, _NON_FINITE, _FULLY_MASKED = 0, 1, 2


def _log_softmax(values: jax.Array) -> jax.Array:
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - jnp.log(jnp.exp(shifted).sum(axis=-1, keepdims=True))


# -- process_logits, in the order of its definition --------------------------------------------------------------------


@jax.jit
def _scored(logits: jax.Array, candidates: jax.Array) -> jax.Array:
    """f32, beams as log-probabilities."""
    values = logits.astype(jnp.float32)
    return jax.lax.cond(
        jnp.any(candidates > 0), lambda v: jnp.where((candidates > 0)[:, None], _log_softmax(v), v), lambda v: v, values
    )


@jax.jit
def _biased(values: jax.Array, offsets: jax.Array, ids: jax.Array, biases: jax.Array) -> jax.Array:
    entry = jnp.arange(len(ids))
    row = jnp.searchsorted(offsets[1:], entry, side="right")  # beyond the last row where the entry is padding
    return values.at[row, ids].add(biases, mode="drop")


@jax.jit
def _masked(values: jax.Array, mask_rows: jax.Array, masks: jax.Array) -> jax.Array:
    """What a row's mask does not have a bit for is removed, lowest bits first."""
    words = masks[jnp.maximum(mask_rows, 0)]
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed = bits.reshape(len(values), -1)[:, : values.shape[1]] == 1
    return jnp.where(allowed | (mask_rows < 0)[:, None], values, _NONE)


_PAST = ("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size", "prompt_lengths")
_CUTS = ("temperature", "top_k", "top_p", "min_p", "typical_p")


@jax.jit
def _finished(
    values: jax.Array, history: jax.Array, where: dict[str, jax.Array], row: dict[str, jax.Array]
) -> jax.Array:
    """Penalties over the tokens up to a row's own, then the temperature and the cuts."""
    rows = where["rows"]
    slots, ends = where["seq_slots"][where["token_seq"][rows]], where["positions"][rows] + 1
    repetition, size = row["repetition_penalty"], row["no_repeat_ngram_size"]
    frequency, presence = row["frequency_penalty"], row["presence_penalty"]

    def when(needed: jax.Array, change: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
        return jax.lax.cond(jnp.any(needed), change, lambda v: v, values)

    values = when(repetition != 1, lambda v: _repetition(v, history[slots], ends, repetition), values)
    values = when(size > 0, lambda v: _ngrams(v, history[slots], ends, size), values)
    values = when(
        (frequency != 0) | (presence != 0),
        lambda v: _output(v, history[slots], row["prompt_lengths"], ends, frequency, presence),
        values,
    )
    warm = row["temperature"] != 0
    values = jnp.where(warm[:, None], values / jnp.where(warm, row["temperature"], 1)[:, None], values)
    top_k, top_p = jnp.where(warm, row["top_k"], 0), jnp.where(warm, row["top_p"], 1)
    min_p, typical_p = jnp.where(warm, row["min_p"], 0), jnp.where(warm, row["typical_p"], 1)
    values = when((top_k > 0) | (top_p < 1), lambda v: _top(v, top_k, top_p), values)
    values = when(min_p > 0, lambda v: _min_p(v, min_p), values)
    return when(typical_p < 1, lambda v: _typical(v, typical_p), values)


def _counts(past: jax.Array, starts: jax.Array, ends: jax.Array, vocabulary: int) -> jax.Array:
    """How often each token comes at the places from start to end of a row's past [rows, length]: i32 [rows, V]."""
    place = jnp.arange(past.shape[1])
    inside = (place >= starts[:, None]) & (place < ends[:, None])
    row = jnp.arange(len(past))[:, None]
    ids = jnp.where(inside, past, vocabulary)
    return jnp.zeros((len(past), vocabulary), jnp.int32).at[row, ids].add(1, mode="drop")


def _repetition(values: jax.Array, past: jax.Array, ends: jax.Array, penalty: jax.Array) -> jax.Array:
    seen = _counts(past, jnp.zeros_like(ends), ends, values.shape[1]) > 0
    weaker = jnp.where(values > 0, values / penalty[:, None], values * penalty[:, None])
    return jnp.where(seen, weaker, values)


def _output(
    values: jax.Array, past: jax.Array, starts: jax.Array, ends: jax.Array, frequency: jax.Array, presence: jax.Array
) -> jax.Array:
    counts = _counts(past, starts, ends, values.shape[1])
    less = frequency[:, None] * counts.astype(jnp.float32) + presence[:, None]
    return jnp.where(counts > 0, values - less, values)


def _ngrams(values: jax.Array, past: jax.Array, ends: jax.Array, size: jax.Array) -> jax.Array:
    """Tokens that would complete an n-gram of the past once more are removed."""
    place = jnp.arange(past.shape[1])
    last = (place >= size[:, None] - 1) & (place < ends[:, None]) & (size > 0)[:, None]

    def compare(n: jax.Array, last: jax.Array) -> jax.Array:
        """Whether the n-gram that ends at a place has, n before its end, what the past has n before the next token."""
        own = jnp.take_along_axis(past, jnp.maximum(ends - n, 0)[:, None], axis=1)
        return last & ((jnp.roll(past, n, axis=1) == own) | (n >= size)[:, None])

    last = jax.lax.fori_loop(1, jnp.max(size), compare, last)
    ids = jnp.where(last, past, values.shape[1])
    return values.at[jnp.arange(len(values))[:, None], ids].set(_NONE, mode="drop")


def _weights(values: jax.Array, left: jax.Array) -> jax.Array:
    """The probabilities of what is left of each row, 0 for the rest."""
    best = jnp.where(left, values, _NONE).max(axis=-1, keepdims=True)
    found = jnp.where(left, jnp.exp(values - jnp.where(jnp.isfinite(best), best, 0)), 0)
    return found / jnp.maximum(found.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def _best_first(keys: jax.Array) -> jax.Array:
    """Ids by ascending key, lowest id first on ties; the two zeros tie."""
    return jnp.argsort(jnp.where(keys == 0, 0.0, keys), axis=-1, stable=True)


def _top(values: jax.Array, k: jax.Array, p: jax.Array) -> jax.Array:
    """Of the finite values the k best, and of these the shortest prefix whose probabilities reach p."""
    finite = jnp.isfinite(values)
    order = _best_first(jnp.where(finite, -values, jnp.inf))
    place = jnp.arange(values.shape[1])
    kept = jnp.where(k > 0, jnp.minimum(k, finite.sum(axis=-1)), finite.sum(axis=-1))
    ordered = jnp.take_along_axis(values, order, axis=-1)
    sums = jnp.cumsum(_weights(ordered, place < kept[:, None]), axis=-1)
    reached = 1 + (sums < p[:, None]).sum(axis=-1)
    kept = jnp.where(p < 1, jnp.minimum(kept, reached), kept)
    rank = jnp.zeros_like(order).at[jnp.arange(len(values))[:, None], order].set(place)
    return jnp.where(finite & (rank >= kept[:, None]), _NONE, values)


def _min_p(values: jax.Array, p: jax.Array) -> jax.Array:
    best = jnp.where(jnp.isfinite(values), values, _NONE).max(axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(best) & (jnp.exp(values - best) < p[:, None]), _NONE, values)


def _typical(values: jax.Array, p: jax.Array) -> jax.Array:
    """The nearest to the mean logit, until their probabilities reach p; what ties with the last one stays."""
    left = jnp.isfinite(values)
    weights = _weights(values, left)
    best = jnp.where(left, values, _NONE).max(axis=-1, keepdims=True)
    logits = jnp.where(left, values - best, 0)
    distances = jnp.abs(logits - (weights * logits).sum(axis=-1, keepdims=True))
    distances = jnp.where(left, distances, jnp.inf)
    order = _best_first(distances)
    sums = jnp.cumsum(jnp.take_along_axis(weights, order, axis=-1), axis=-1)
    last = jnp.minimum((sums < p[:, None]).sum(axis=-1), left.sum(axis=-1) - 1)
    border = jnp.take_along_axis(distances, jnp.take_along_axis(order, jnp.maximum(last, 0)[:, None], axis=-1), axis=-1)
    return jnp.where(left & (distances > border) & (p < 1)[:, None], _NONE, values)


_OFF = {"typical_p": (1, jnp.float32), "no_repeat_ngram_size": (0, jnp.int32), "candidates": (0, jnp.int32)}
_WHERE = ("rows", "positions", "token_seq", "seq_slots")


def _row_values(call: Call, frame: Frame, names: tuple[str, ...], count: int) -> dict[str, jax.Array]:
    """A row's parameters; those that the call has not are off."""
    found = {}
    for name in names:
        value = call.inputs.get(name)
        found[name] = frame.values[value.id] if value is not None else jnp.full(count, *_OFF[name])
    return found


def _process_logits(call: Call) -> StepFn:
    ids = {name: value.id for name, value in call.inputs.items()}
    state, output = call.states["history"], call.outputs[0].id

    def run(frame: Frame) -> None:
        given = {name: frame.values[key] for name, key in ids.items()}
        count = len(given["rows"])
        row = _row_values(call, frame, (*_PAST, *_CUTS, "candidates"), count)
        values = _scored(given["logits"], row.pop("candidates"))
        if len(given["bias_ids"]):
            values = _biased(values, given["bias_offsets"], given["bias_ids"], given["bias_values"])
        if len(given["masks"]):
            values = _masked(values, given["mask_rows"], given["masks"])
        where = {name: given[name] for name in _WHERE}
        frame.values[output] = _finished(values, frame.states[state], where, row)

    return run


# -- sample ------------------------------------------------------------------------------------------------------------

_SAMPLED = ("temperature", "seeds", "branches", "want_logprobs", "candidates", "targets")


@partial(jax.jit, donate_argnums=0, static_argnames="width")
def _sampled(
    history: jax.Array,
    processed: jax.Array,
    logits: jax.Array,
    where: dict[str, jax.Array],
    row: dict[str, jax.Array],
    width: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The history with the rows' tokens, and the outputs of ``sample`` with ``width`` best tokens a row."""
    raw, rows = logits.astype(jnp.float32), where["rows"]
    sequence, position = where["token_seq"][rows], where["positions"][rows] + 1
    targets, beams, wanted = row["targets"], row["candidates"], row["want_logprobs"]
    finite = jnp.isfinite(processed)
    bad = jnp.any(jnp.isnan(raw) | (raw == jnp.inf), axis=-1)
    masked = ~bad & (targets < 0) & ~jnp.any(finite, axis=-1)
    status = jnp.where(bad, _NON_FINITE, jnp.where(masked, _FULLY_MASKED, _OK)).astype(jnp.int32)
    chosen = _chosen(processed, finite, position, row)
    tokens = jnp.where(bad | masked, 0, jnp.where(targets >= 0, targets, chosen)).astype(jnp.int32)
    history = _remembered(history, tokens, where, sequence, position)

    good = status == _OK
    plain = good & (beams == 0) & (wanted >= 0)
    logprobs = jax.lax.cond(jnp.any(plain), _log_softmax, jnp.zeros_like, raw)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    ids, best = _best(raw, logprobs, processed, finite, jnp.where(good, beams, 0), jnp.where(plain, wanted, 0), width)
    return history, (tokens, status, jnp.where(plain, own, 0), ids, best)


def _chosen(processed: jax.Array, finite: jax.Array, position: jax.Array, row: dict[str, jax.Array]) -> jax.Array:
    """The greatest finite value, with noise where the row has a temperature; lowest id on ties."""
    warm = row["temperature"] != 0
    scores = jnp.where(finite, processed, _NONE)

    def noisy(scores: jax.Array) -> jax.Array:
        noise = gumbel(row["seeds"], position, row["branches"], scores.shape[1])
        return jnp.where(warm[:, None], scores + noise, scores)

    return jnp.argmax(jax.lax.cond(jnp.any(warm), noisy, lambda s: s, scores), axis=-1)


def _remembered(
    history: jax.Array, tokens: jax.Array, where: dict[str, jax.Array], sequence: jax.Array, position: jax.Array
) -> jax.Array:
    """Each sequence's last row of the step writes its token, where there is room."""
    token = jnp.arange(len(where["token_seq"]))
    later = (where["token_seq"] == sequence[:, None]) & (token > where["rows"][:, None])
    slot = jnp.where(jnp.any(later, axis=-1), len(history), where["seq_slots"][sequence])
    return history.at[slot, position].set(tokens, mode="drop")


def _best(
    raw: jax.Array,
    logprobs: jax.Array,
    processed: jax.Array,
    finite: jax.Array,
    beams: jax.Array,
    wanted: jax.Array,
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """Of each row the best tokens and what they have: of a beam processed values, else log-probabilities."""
    count = min(width, raw.shape[1])
    if not count:
        return jnp.full((len(raw), width), -1, jnp.int32), jnp.zeros((len(raw), width), jnp.float32)
    is_beam = (beams > 0)[:, None]
    keys = jnp.where(is_beam, jnp.where(finite, processed, _NONE), raw)
    _, ids = jax.lax.top_k(jnp.where(keys == 0, 0.0, keys), count)
    found = jnp.take_along_axis(jnp.where(is_beam, processed, logprobs), ids, axis=-1)
    most = jnp.where(beams > 0, jnp.minimum(beams, finite.sum(axis=-1)), wanted)
    taken = jnp.arange(count) < most[:, None]
    more = ((0, 0), (0, width - count))
    return (
        jnp.pad(jnp.where(taken, ids, -1).astype(jnp.int32), more, constant_values=-1),
        jnp.pad(jnp.where(taken, found, 0), more),
    )


_OFF |= {"targets": (-1, jnp.int32)}


def _sample(call: Call) -> StepFn:
    ids = {name: value.id for name, value in call.inputs.items()}
    state, outputs = call.states["history"], [value.id for value in call.outputs]

    def run(frame: Frame) -> None:
        values = frame.values
        where = {name: values[ids[name]] for name in _WHERE}
        row = _row_values(call, frame, _SAMPLED, len(where["rows"]))
        frame.states[state], found = _sampled(
            frame.states[state], values[ids["processed"]], values[ids["logits"]], where, row, frame.dims.K
        )
        values.update(zip(outputs, found, strict=True))

    return run


OPS: Mapping[str, Op] = {
    "process_logits": Op(frozenset({"typical_p", "no_repeat_ngram_size", "candidates"}), bind=_process_logits),
    "sample": Op(frozenset({"candidates", "targets"}), bind=_sample),
}
