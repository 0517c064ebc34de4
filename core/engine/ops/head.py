"""The end of a step: process_logits and sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..backend.v1 import Array, Dims
from .philox import philox4x32, uniform
from .spec import Case, Generator, OpSpec, Tolerance

OK, NON_FINITE, FULLY_MASKED = 0, 1, 2


def process_logits(
    *,
    logits: Array,
    rows: Array,
    positions: Array,
    token_seq: Array,
    seq_slots: Array,
    prompt_lengths: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    repetition_penalty: Array,
    frequency_penalty: Array,
    presence_penalty: Array,
    bias_offsets: Array,
    bias_ids: Array,
    bias_values: Array,
    mask_rows: Array,
    masks: Array,
    history: Array,
    typical_p: Array | None = None,
    no_repeat_ngram_size: Array | None = None,
    candidates: Array | None = None,
) -> tuple[Array]:
    """logits f32 [R, V] as they are sampled from: f32 [R, V], what is removed is -inf.

    In this order, each with its own row of parameters (STEP_INPUTS gives shapes and the values that turn one off):
    0. where candidates is not 0 the logits are replaced by their log-softmax, as beam search scores tokens;
    1. bias_values are added at bias_ids;
    2. tokens whose mask bit (token % 32 of word token / 32) is not set are removed;
    3. repetition penalty over the tokens of history 0..position: positive logits are divided, others multiplied;
    4. no-repeat n-gram: tokens that would complete an n-gram of history 0..position once more are removed;
    5. frequency_penalty * count and presence_penalty are subtracted for the tokens of history prompt_length..position;
    6. at temperature 0 this is all, else logits are divided by it;
    7. top-k: exactly k are kept, lowest id first on ties;
    8. top-p: of the descending probabilities (lowest id first on ties) the shortest prefix whose sum reaches top_p is
       kept, at least one;
    9. min-p: probabilities below min_p times the greatest are removed;
    10. typical-p: tokens are kept in the order of |-log p - entropy|, ascending, until their probabilities reach
       typical_p, all that tie with the last one included.
    Sources: Keskar et al. (2019) for 3, Paulus et al. (2017) for 4, Fan et al. (2018) for 7, Holtzman et al. (2020) for
    8, Nguyen et al. (2024) for 9, Meister et al. (2022) for 10.
    """
    processed = logits.astype(np.float32)
    for row, values in enumerate(processed):
        token = rows[row]
        past = history[seq_slots[token_seq[token]], : positions[token] + 1]
        entries = slice(bias_offsets[row], bias_offsets[row + 1])
        with np.errstate(over="ignore", invalid="ignore"):  # such logits end their own request, as status 1 or 2
            if candidates is not None and candidates[row] > 0:
                values[:] = log_softmax(values)
            np.add.at(values, bias_ids[entries], bias_values[entries])
            if mask_rows[row] >= 0:
                values[~_allowed(masks[mask_rows[row]], len(values))] = -np.inf
            _penalize_repetition(values, past, repetition_penalty[row])
            if no_repeat_ngram_size is not None:
                _ban_ngrams(values, past, int(no_repeat_ngram_size[row]))
            _penalize_output(values, past[prompt_lengths[row] :], frequency_penalty[row], presence_penalty[row])
            if temperature[row] != 0:
                np.divide(values, temperature[row], out=values)
                _keep_top_k(values, int(top_k[row]))
                _keep_top_p(values, float(top_p[row]))
                _keep_min_p(values, float(min_p[row]))
                if typical_p is not None:
                    _keep_typical_p(values, float(typical_p[row]))
    return (processed,)


def _allowed(mask: Array, vocabulary: int) -> Array:
    """The first bits of u32 words, lowest first, as booleans."""
    bits = mask.astype(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    return bits.reshape(-1)[:vocabulary].astype(bool)


def _penalize_repetition(values: Array, past: Array, penalty: np.float32) -> None:
    seen = np.unique(past)
    values[seen] = np.where(values[seen] > 0, values[seen] / penalty, values[seen] * penalty)


def _ban_ngrams(values: Array, past: Array, size: int) -> None:
    if 0 < size <= len(past):
        ngrams = np.lib.stride_tricks.sliding_window_view(past, size)
        values[ngrams[(ngrams[:, :-1] == past[len(past) + 1 - size :]).all(axis=1), -1]] = -np.inf


def _penalize_output(values: Array, output: Array, frequency: np.float32, presence: np.float32) -> None:
    seen, counts = np.unique(output, return_counts=True)
    values[seen] -= frequency * counts.astype(np.float32) + presence


def _descending(values: Array) -> Array:
    """Ids of the tokens that are left, best first, lowest id first on ties."""
    left = np.flatnonzero(np.isfinite(values))
    return left[np.argsort(-values[left], kind="stable")]


def _keep_top_k(values: Array, k: int) -> None:
    if k > 0:
        values[_descending(values)[k:]] = -np.inf


def _keep_top_p(values: Array, p: float) -> None:
    order = _descending(values)
    if p < 1 and len(order):
        weights = np.exp(values[order].astype(np.float64) - values[order].max())
        sums = np.cumsum(weights / weights.sum())
        values[order[1 + np.searchsorted(sums, p) :]] = -np.inf


def _keep_min_p(values: Array, p: float) -> None:
    best = values[np.isfinite(values)].max(initial=-np.inf)
    if np.isfinite(best):
        values[np.exp(values.astype(np.float64) - best) < p] = -np.inf


def _keep_typical_p(values: Array, p: float) -> None:
    left = np.flatnonzero(np.isfinite(values))
    if p < 1 and len(left):
        # -log p - entropy is a logit's distance from the mean logit.
        logits = values[left].astype(np.float64) - values[left].max()
        weights = np.exp(logits) / np.exp(logits).sum()
        distances = np.abs(logits - (weights * logits).sum())
        order = np.argsort(distances, kind="stable")
        last = min(int(np.searchsorted(np.cumsum(weights[order]), p)), len(order) - 1)
        values[left[distances > distances[order[last]]]] = -np.inf


def sample(
    *,
    processed: Array,
    logits: Array,
    rows: Array,
    positions: Array,
    token_seq: Array,
    seq_slots: Array,
    temperature: Array,
    seeds: Array,
    branches: Array,
    want_logprobs: Array,
    history: Array,
    dims: Dims,
    candidates: Array | None = None,
    targets: Array | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """The next token of each row, written to history at the row's position + 1 where that is within it and the row is
    the last of its sequence in the step.

    Returns tokens i32 [R], status i32 [R], logprob f32 [R] (of the token), top_ids i32 [R, K], top_logprobs f32 [R, K].
    Status: 0 good; 1 a NaN or +inf in the raw logits; 2 no finite processed logit. Rows of status 1 and 2 give token 0
    and no logprobs. Temperature 0: the greatest processed logit. Else the greatest of processed - log(-log u) over the
    finite ones (Gumbel 1954), where u = (x >> 8) * 2^-24 + 2^-25 and x is lane token % 4 of Philox4x32-10 with key
    seeds[row] and counter (token / 4, position + 1, branch, 0); this u needs 25 bits, and its logarithm is taken of the
    exact value. Lowest id on ties. Logprobs are of the raw logits' softmax: for want_logprobs n >= 0 the token's and
    the n best in descending order, lowest id first on ties; what is not wanted is id -1, logprob 0.

    Where targets is not -1 it is the token, and nothing is chosen: only status 1 can come. Where candidates is k > 0,
    top_ids and top_logprobs are of the k best finite processed values instead, as they are, and there is no logprob.
    """
    count, width = len(rows), dims.K
    tokens = np.zeros(count, np.int32)
    status = np.zeros(count, np.int32)
    logprob = np.zeros(count, np.float32)
    top_ids = np.full((count, width), -1, np.int32)
    top_logprobs = np.zeros((count, width), np.float32)
    for row, (values, raw) in enumerate(zip(processed, logits, strict=True)):
        sequence, position = token_seq[rows[row]], int(positions[rows[row]]) + 1
        is_last = sequence not in token_seq[rows[row] + 1 :]
        target = -1 if targets is None else int(targets[row])
        beams = 0 if candidates is None else int(candidates[row])
        if np.isnan(raw).any() or np.isposinf(raw).any():
            status[row] = NON_FINITE
        elif target >= 0:
            tokens[row] = target
        elif not np.isfinite(values).any():
            status[row] = FULLY_MASKED
        else:
            tokens[row] = _choose(values, temperature[row], seeds[row], position, branches[row])
        if is_last and position < history.shape[1]:
            history[seq_slots[sequence], position] = tokens[row]
        wanted = int(want_logprobs[row])
        if status[row] == OK and beams > 0:
            best = _descending(values)[:beams]
            top_ids[row, : len(best)] = best
            top_logprobs[row, : len(best)] = values[best]
        elif status[row] == OK and wanted >= 0:
            logprobs = log_softmax(raw)
            best = np.argsort(-raw, kind="stable")[:wanted]
            logprob[row] = logprobs[tokens[row]]
            top_ids[row, : len(best)] = best
            top_logprobs[row, : len(best)] = logprobs[best]
    return tokens, status, logprob, top_ids, top_logprobs


def log_softmax(raw: Array) -> Array:
    """f64 log-probabilities of one row of logits."""
    shifted = raw.astype(np.float64) - raw.max()
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def _choose(values: Array, temperature: np.float32, seed: Array, position: int, branch: np.uint32) -> int:
    """Infinite logits are left out, +inf as well: a bias may have made it."""
    finite = np.isfinite(values)
    scores = np.where(finite, values, -np.inf).astype(np.float64)
    if temperature != 0:
        scores[finite] += gumbel(seed, position, branch, len(values))[finite]
    return int(np.argmax(scores))


def gumbel(seed: Array, position: int, branch: np.uint32, vocabulary: int) -> Array:
    """The noise -log(-log u) of every token, f64 [vocabulary]; see ``sample``."""
    counter = np.zeros((-(-vocabulary // 4), 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1:3] = position, branch
    words = philox4x32(counter, seed).reshape(-1)[:vocabulary]
    noise: Array = -np.log(-np.log(uniform(words)))
    return noise


def random_rows(rng: Generator, tokens: int, count: int, vocabulary: int) -> tuple[dict[str, Array], Array]:
    """Rows of a step of one-token and longer sequences with their inputs, and a history that holds their pasts."""
    max_len = 48
    cuts = np.sort(rng.permutation(np.arange(1, tokens))[: count - 1])
    lengths = np.diff([0, *cuts, tokens])
    starts = rng.integers(0, 20, count)
    token_seq = np.repeat(np.arange(count), lengths).astype(np.int32)
    last = np.cumsum(lengths) - 1
    within = np.arange(tokens) - (last - lengths + 1)[token_seq]
    inputs = {
        "rows": last.astype(np.int32),
        "positions": (starts[token_seq] + within).astype(np.int32),
        "token_seq": token_seq,
        "seq_slots": rng.permutation(count + 2)[:count].astype(np.int32),
    }
    return inputs, rng.integers(0, vocabulary, (count + 2, max_len), dtype=np.int32)


def random_parameters(rng: Generator, positions: Array, vocabulary: int, **used: bool) -> dict[str, Array]:
    """Sampling parameters of rows at ``positions``: those named are random, all others off."""
    count = len(positions)

    def pick(name: str, values: Any, off: float, dtype: str = "f4") -> Array:
        return np.where(used.get(name, False), values, off).astype(dtype)

    biases = rng.integers(0, 5, count) * used.get("bias", False)
    total = int(biases.sum())
    masks = rng.integers(0, 2**32, (2, (vocabulary + 31) // 32), dtype=np.uint32)
    return {
        "prompt_lengths": rng.integers(1, positions + 2, dtype=np.int32),
        "temperature": pick("temperature", rng.uniform(0.3, 2, count), 0),
        "top_k": pick("top_k", rng.integers(1, vocabulary + 3, count), 0, "i4"),
        "top_p": pick("top_p", rng.uniform(0.05, 1, count), 1),
        "min_p": pick("min_p", rng.uniform(0, 0.5, count), 0),
        "typical_p": pick("typical_p", rng.uniform(0.05, 1, count), 1),
        "repetition_penalty": pick("penalties", rng.uniform(0.7, 1.8, count), 1),
        "frequency_penalty": pick("penalties", rng.uniform(-1, 1, count), 0),
        "presence_penalty": pick("penalties", rng.uniform(-1, 1, count), 0),
        "no_repeat_ngram_size": pick("ngrams", rng.integers(0, 4, count), 0, "i4"),
        "candidates": pick("beams", rng.integers(0, 9, count), 0, "i4"),
        "bias_offsets": np.cumsum([0, *biases]).astype(np.int32),
        "bias_ids": rng.integers(0, vocabulary, total, dtype=np.int32),
        "bias_values": np.where(rng.random(total) < 0.3, -np.inf, rng.uniform(-9, 9, total)).astype(np.float32),
        "mask_rows": pick("masks", rng.integers(-1, 2, count), -1, "i4"),
        "masks": masks if used.get("masks") else masks[:0],
    }


def process_logits_cases(rng: Generator) -> Iterator[Case]:
    every = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "typical_p"), True)
    every |= dict.fromkeys(("penalties", "ngrams", "bias", "masks", "beams"), True)
    sampled = {"temperature": True}
    for name, tokens, count, vocabulary, used in (
        ("greedy, one row", 1, 1, 64, {}),
        ("temperature", 5, 3, 100, {"temperature": True}),
        ("greedy with penalties and bias", 9, 4, 50, {"penalties": True, "bias": True}),
        ("top-k with ties", 6, 6, 40, {"temperature": True, "top_k": True}),
        ("top-p", 30, 5, 257, {"temperature": True, "top_p": True}),
        ("min-p", 4, 2, 128, {"temperature": True, "min_p": True}),
        ("masks", 7, 7, 33, {"masks": True}),
        ("typical-p", 8, 5, 120, {"temperature": True, "typical_p": True}),
        ("n-grams", 24, 6, 5, {"ngrams": True}),
        ("beams", 6, 6, 70, {"beams": True, "penalties": True, "ngrams": True}),
        ("large logits", 9, 6, 90, {**sampled, "top_p": True, "min_p": True, "typical_p": True}),
        ("nothing allowed", 6, 4, 40, {**sampled, "masks": True, "top_p": True, "min_p": True, "typical_p": True}),
        ("large logits of beams", 6, 6, 70, {"beams": True}),
        ("everything", 20, 8, 512, every),
    ):
        rows, history = random_rows(rng, tokens, count, vocabulary)
        inputs = _random_inputs(rng, name, rows, vocabulary, used)
        while is_on_a_border(inputs, history):  # a parameter may be on one by itself
            inputs = _random_inputs(rng, name, rows, vocabulary, used)
        dims = Dims(T=tokens, S=count, R=count, B=len(inputs["bias_ids"]), M=len(inputs["masks"]))
        yield Case(name, dims, inputs, states={"history": history})


def _random_inputs(
    rng: Generator, name: str, rows: dict[str, Array], vocabulary: int, used: Mapping[str, bool]
) -> dict[str, Array]:
    parameters = random_parameters(rng, rows["positions"][rows["rows"]], vocabulary, **used)
    if "ties" in name:
        parameters["temperature"][:], parameters["top_k"][0] = 1, 1
    if "nothing" in name:
        parameters["masks"][0], parameters["mask_rows"][:2] = 0, 0
    return {"logits": _random_logits(rng, name, (len(rows["rows"]), vocabulary)), **rows, **parameters}


def _random_logits(rng: Generator, name: str, shape: tuple[int, int]) -> Array:
    logits = rng.standard_normal(shape, np.float32) * np.float32(3)
    if "ties" in name:
        logits = np.round(logits)
    if "large" in name:
        logits += np.float32(800)  # whose exponentials overflow
    return logits


def is_on_a_border(inputs: dict[str, Array], history: Array) -> bool:
    """Whether the rounding of a sum of probabilities may decide what is kept, so that a case has no one right answer."""
    kept = []
    for factor in (np.float32(1 - 1e-5), np.float32(1 + 1e-5)):
        limits = {name: inputs[name] for name in ("top_p", "min_p", "typical_p")}
        moved = {name: np.where(limit < 1, limit * factor, limit) for name, limit in limits.items()}
        kept.append(np.isfinite(process_logits(**(inputs | moved), history=history)[0]))
    low, high = kept
    return not np.array_equal(low, high)


def sample_cases(rng: Generator) -> Iterator[Case]:
    for name, tokens, count, vocabulary, width in (
        ("greedy, one row", 1, 1, 64, 0),
        ("greedy with ties", 5, 5, 30, 0),
        ("random", 20, 8, 515, 0),
        ("logprobs", 9, 6, 100, 5),
        ("bad rows", 8, 8, 66, 3),
        ("history is full", 4, 4, 33, 2),
        ("beams and targets", 8, 8, 66, 6),
        ("every row", 12, 4, 40, 2),
        ("large", 7, 5, 37, 37),
    ):
        rows, history = random_rows(rng, tokens, count, vocabulary)
        logits = rng.standard_normal((count, vocabulary), np.float32) * np.float32(2)
        temperature = np.zeros(count) if "greedy" in name else rng.choice([0, 0.5, 1], count)
        if "ties" in name:
            logits = np.round(logits)
        if "large" in name:
            logits += np.float32(800)  # whose exponentials overflow
        divisor = np.where(temperature, temperature, 1)[:, None]
        processed = np.where(rng.random(logits.shape) < 0.3, -np.inf, logits / divisor)
        if "bad" in name:
            logits[1, 7], logits[2, 9], logits[5, 0] = np.nan, np.inf, -np.inf
            processed[1, 7], processed[2, 9], processed[5, 0] = np.nan, np.inf, -np.inf
            processed[3] = -np.inf
        if "full" in name:
            history = np.ascontiguousarray(history[:, : rows["positions"].max() + 1])
        if "every" in name:  # the sequences' last rows alone write: here of two that are neighbours
            end = np.flatnonzero(rows["token_seq"] == np.bincount(rows["token_seq"]).argmax())[-1]
            others = rng.permutation(np.setdiff1d(np.arange(tokens), (end - 1, end)))[: count - 2]
            rows["rows"] = np.sort([end - 1, end, *others]).astype(np.int32)
        more: dict[str, Array] = {}
        wanted = rng.integers(-1, width + 1, count, dtype=np.int32)
        wanted[0] = 0  # the chosen token's alone
        if "beams" in name:
            more["candidates"] = rng.integers(0, width + 1, count, dtype=np.int32)
            more["targets"] = np.where(rng.random(count) < 0.5, rng.integers(0, vocabulary, count), -1).astype(np.int32)
            more["targets"][0] = 0
            more["candidates"][more["targets"] >= 0] = 0
        yield Case(
            name,
            Dims(T=tokens, S=count, R=count, K=width),
            {
                "processed": processed.astype(np.float32),
                "logits": logits,
                **rows,
                "temperature": temperature.astype(np.float32),
                "seeds": rng.integers(0, 2**32, (count, 2), dtype=np.uint32),
                "branches": rng.integers(0, 4, count, dtype=np.uint32),
                "want_logprobs": wanted,
                **more,
            },
            states={"history": history},
        )


_ROW_INPUTS = ("rows", "positions", "token_seq", "seq_slots")

SPECS = (
    OpSpec(
        "process_logits",
        inputs=(
            "logits",
            *_ROW_INPUTS,
            "prompt_lengths",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "bias_offsets",
            "bias_ids",
            "bias_values",
            "mask_rows",
            "masks",
            "typical_p?",
            "no_repeat_ngram_size?",
            "candidates?",
        ),
        states=("history",),
        outputs=("processed",),
        reference=process_logits,
        tolerance=Tolerance(1e-5, 1e-5),
        cases=process_logits_cases,
    ),
    OpSpec(
        "sample",
        inputs=(
            *("processed", "logits", *_ROW_INPUTS, "temperature"),
            *("seeds", "branches", "want_logprobs", "candidates?", "targets?"),
        ),
        states=("history",),
        outputs=("tokens", "status", "logprob", "top_ids", "top_logprobs"),
        reference=sample,
        tolerance=Tolerance(1e-5, 1e-5),
        cases=sample_cases,
    ),
)
