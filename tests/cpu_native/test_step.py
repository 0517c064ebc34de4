"""step_expand, process_logits and sample against their definitions."""

import numpy as np
import pytest
from one_kernel import ISAS, run_kernel

every_isa = pytest.mark.parametrize("isa", ISAS)


@every_isa
@pytest.mark.parametrize("block_sizes", [(16,), (4, 32), ()])
def test_step_expand(isa: str, block_sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng()
    lengths, starts, max_len = np.array([1, 9, 4]), np.array([11, 0, 30], np.int32), 64
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    tokens = int(offsets[-1])
    token_ids = rng.integers(0, 1000, tokens, dtype=np.int32)
    token_ids[[0, 11]] = -1
    slots = rng.permutation(8)[:3].astype(np.int32)
    copies = np.array([[6, slots[0]], [slots[0], 7], [slots[1], slots[2]]], np.int32)
    fill_slots = rng.integers(0, 8, 5, dtype=np.int32)
    fill_positions = rng.permutation(max_len)[:5].astype(np.int32)
    fill_slots[0], fill_positions[0] = slots[0], 11
    fill_ids = rng.integers(0, 1000, 5, dtype=np.int32)
    tables = [rng.integers(0, 99, (3, 70 // size + 1), dtype=np.int32) for size in block_sizes]
    width = max((t.shape[1] for t in tables), default=0)
    tables = [np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables]
    history = rng.integers(0, 1000, (8, max_len), dtype=np.int32)

    after = history.copy()
    for source, target in copies:
        after[target] = after[source]
    after[fill_slots, fill_positions] = fill_ids
    sequence = np.repeat(np.arange(3), lengths)
    positions = starts[sequence] + np.arange(tokens) - offsets[sequence]
    given = token_ids >= 0
    after[slots[sequence][given], positions[given]] = token_ids[given]
    kv_slots = [t[sequence, positions // b] * b + positions % b for t, b in zip(tables, block_sizes, strict=True)]
    wanted = [after[slots[sequence], positions], positions, sequence, *kv_slots]

    numbers = {f"block_size.{g}": size for g, size in enumerate(block_sizes)}
    got = run_kernel(
        "step_expand",
        {"T": tokens, "S": 3, "P": width, "H": 3, "F": 5},
        [token_ids, slots, starts, offsets, copies, fill_slots, fill_positions, fill_ids, *tables],
        [((tokens,), np.int32)] * len(wanted),
        states=[history],
        numbers={"max_len": max_len, "groups": len(block_sizes), **numbers},
        isa=isa,
    )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(history, after)


def rows_of_a_step(rng: np.random.Generator, count: int, vocabulary: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """One row a sequence of a few tokens each, and a history that repeats itself."""
    lengths = rng.integers(1, 4, count)
    last = np.cumsum(lengths) - 1
    starts = rng.integers(0, 60, count)
    sequence = np.repeat(np.arange(count), lengths)
    positions = starts[sequence] + np.arange(len(sequence)) - (last - lengths + 1)[sequence]
    inputs = {
        "rows": last, "positions": positions, "token_seq": sequence, "seq_slots": rng.permutation(count + 1)[:count],
    }  # fmt: skip
    history = rng.integers(0, min(vocabulary, 40), (count + 1, 100), dtype=np.int32)
    return {name: array.astype(np.int32) for name, array in inputs.items()}, history


OFF = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition": 1, "frequency": 0, "presence": 0}
LATER = {"typical_p": 1, "ngram": 0, "candidates": 0}  # inputs after the masks, which may be absent
INTEGERS = ("top_k", "ngram", "candidates")
PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "large top_k": {"top_k": 300, "temperature": 3.0},
    "top_k beyond the vocabulary": {"top_k": 1 << 20},
    "top_p": {"top_p": 0.8},
    "small top_p": {"top_p": 1e-6},
    "large top_p": {"top_p": 0.999, "temperature": 50.0},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
    "typical_p after min_p": {"typical_p": 0.3, "min_p": 0.01},
    "small typical_p": {"typical_p": 1e-6},
    "n-grams": {"ngram": 2, "temperature": 0.0},
    "1-grams": {"ngram": 1},
    "beams": {"candidates": 4, "repetition": 1.3, "ngram": 3, "temperature": 0.0},
    "sampled beams": {"candidates": 3},
    "repetition": {"repetition": 1.3},
    "frequency": {"frequency": 0.4},
    "presence": {"presence": 0.3},
    "penalties": {"repetition": 1.3, "frequency": 0.4, "presence": -0.2, "temperature": 0.0},
    "all": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition": 0.8,
        "frequency": 0.2,
        "presence": 0.3,
        "typical_p": 0.8,
        "ngram": 2,
    },
}


def processed_row(x: np.ndarray, past: np.ndarray, prompt: int, p: dict[str, float], slack: float = 0) -> np.ndarray:
    """One row after bias and mask, in float32 up to the temperature and float64 from there. With slack the thresholds
    let a little more (or, negative, less) through: a kernel that rounds otherwise keeps a set between the two."""
    x = x.copy()
    one = np.float32
    n = int(p["ngram"])
    ends = range(n, len(past) + 1) if n else ()
    banned = [past[e - 1] for e in ends if np.array_equal(past[e - n : e - 1], past[len(past) - n + 1 :])]
    seen = np.unique(past)
    x[seen] = np.where(x[seen] > 0, x[seen] / one(p["repetition"]), x[seen] * one(p["repetition"]))
    ids, counts = np.unique(past[prompt:], return_counts=True)
    x[ids] -= one(p["frequency"]) * counts.astype(one) + one(p["presence"])
    x[banned] = -np.inf
    if p["temperature"] == 0:
        return x
    x /= one(p["temperature"])
    order = np.argsort(-x, kind="stable")
    order = order[np.isfinite(x[order])]
    if not len(order):
        return x
    if p["top_k"]:
        order = order[: int(p["top_k"])]
    if p["top_p"] < 1:
        weights = np.exp(x[order].astype(np.float64) - x[order[0]])
        order = order[: 1 + np.searchsorted(np.cumsum(weights / weights.sum()), p["top_p"] * (1 + slack))]
    order = order[np.exp(x[order].astype(np.float64) - x[order[0]]) >= p["min_p"] * (1 - slack)]
    if p["typical_p"] < 1:
        weights = np.exp(x[order].astype(np.float64) - x[order[0]])
        weights /= weights.sum()
        distances = np.abs(x[order] - (weights * x[order]).sum())
        nearest = np.argsort(distances, kind="stable")
        reached = np.searchsorted(np.cumsum(weights[nearest]), p["typical_p"] * (1 + slack))
        farthest = distances[nearest[min(reached, len(order) - 1)]]
        order = order[distances <= max(farthest + slack * (1 + farthest), distances.min())]
    kept = np.full_like(x, -np.inf)
    kept[order] = x[order]
    return kept


@every_isa
@pytest.mark.parametrize("vocabulary", [7, 64, 1000, 20011])
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("tied", [False, True])
def test_process_logits(isa: str, vocabulary: int, name: str, tied: bool) -> None:
    rng = np.random.default_rng()
    count = 4
    rows, history = rows_of_a_step(rng, count, vocabulary)
    logits = rng.standard_normal((count, vocabulary), np.float32) * 4
    if tied:
        logits = np.round(logits)
    parameters = {**OFF, **LATER, **PARAMETERS[name]}
    columns, later = (
        [np.full(count, parameters[key], np.int32 if key in INTEGERS else np.float32) for key in names]
        for names in (OFF, LATER)
    )
    if not LATER.keys() & PARAMETERS[name].keys():
        later = [None] * len(later)
    prompts = rng.integers(0, 70, count, dtype=np.int32)
    offsets = np.array([0, 2, 2, 6, 6], np.int32)
    bias_ids = rng.integers(0, vocabulary, 6, dtype=np.int32)
    bias = np.array([1.5, -np.inf, 2, -3, 0.25, 100], np.float32)
    mask_rows = np.array([-1, -1, 1, 0], np.int32)  # and bias: alone, neither, both, mask alone
    allowed = rng.random((2, vocabulary)) < 0.5
    allowed[:, 3] = True
    bits = np.packbits(allowed, axis=1, bitorder="little")
    masks = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4))).view(np.uint32)
    (got,) = run_kernel(
        "process_logits",
        {"T": len(rows["positions"]), "S": count, "R": count, "B": 6, "M": 2},
        [logits, *rows.values(), prompts, *columns, offsets, bias_ids, bias, mask_rows, masks, *later],
        [(logits.shape, np.float32)],
        states=[history],
        numbers={"width": vocabulary, "max_len": history.shape[1]},
        isa=isa,
    )
    for r in range(count):
        x = logits[r].copy()
        if parameters["candidates"]:
            raw = x.astype(np.float64) - x.max()
            x = (raw - np.log(np.exp(raw).sum())).astype(np.float32)
        np.add.at(x, bias_ids[offsets[r] : offsets[r + 1]], bias[offsets[r] : offsets[r + 1]])
        if mask_rows[r] >= 0:
            x[~allowed[mask_rows[r]]] = -np.inf
        token = rows["rows"][r]
        past = history[rows["seq_slots"][rows["token_seq"][token]], : rows["positions"][token] + 1]
        least, most = (processed_row(x, past, int(prompts[r]), parameters, slack) for slack in (-1e-5, 1e-5))
        kept = np.isfinite(got[r])
        assert not np.any(np.isfinite(least) & ~kept), f"row {r} lost {np.flatnonzero(np.isfinite(least) & ~kept)}"
        assert not np.any(kept & ~np.isfinite(most)), f"row {r} kept {np.flatnonzero(kept & ~np.isfinite(most))}"
        tolerance = {"rtol": 1e-6, "atol": 1e-5 if parameters["candidates"] else 0}
        np.testing.assert_allclose(got[r][kept], most[kept], **tolerance)


@every_isa
def test_processed_rows_do_not_depend_on_the_step(isa: str) -> None:
    rng = np.random.default_rng()
    count, vocabulary = 5, 9001
    rows, history = rows_of_a_step(rng, count, vocabulary)
    logits = rng.standard_normal((count, vocabulary), np.float32) * 3
    values = {**OFF, **LATER, **PARAMETERS["all"], "candidates": 4}
    columns = {key: np.full(count, v, np.int32 if key in INTEGERS else np.float32) for key, v in values.items()}

    def run(picked: list[int], threads: int) -> np.ndarray:
        places = rows["rows"][picked]
        own = [np.arange(len(picked)), rows["positions"][places], np.arange(len(picked))]
        own += [rows["seq_slots"][rows["token_seq"][places]], np.full(len(picked), 2)]
        off = [np.zeros(len(picked) + 1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)]
        off += [np.full(len(picked), -1, np.int32), np.zeros(0, np.uint32)]
        chosen = {key: column[picked] for key, column in columns.items()}
        (got,) = run_kernel(
            "process_logits",
            {"T": len(picked), "S": len(picked), "R": len(picked)},
            [
                logits[picked],
                *(array.astype(np.int32) for array in own),
                *(chosen[key] for key in OFF),
                *off,
                *(chosen[key] for key in LATER),
            ],
            [((len(picked), vocabulary), np.float32)],
            states=[history],
            numbers={"width": vocabulary, "max_len": history.shape[1]},
            isa=isa,
            threads=threads,
        )
        return got

    whole = run(list(range(count)), 1)
    np.testing.assert_array_equal(run(list(range(count)), 3), whole)
    for row in range(count):
        np.testing.assert_array_equal(run([row], 2), whole[row : row + 1])


def test_process_logits_of_rows_that_are_broken() -> None:
    rng = np.random.default_rng()
    rows, history = rows_of_a_step(rng, 3, 100)
    logits = rng.standard_normal((3, 100), np.float32)
    logits[0, 5], logits[0, 6] = np.nan, np.inf
    logits[1] = -np.inf
    logits[2] = np.nan
    every = {**OFF, **LATER, "candidates": 3, **PARAMETERS["all"]}
    columns, later = (
        [np.full(3, every[key], np.int32 if key in INTEGERS else np.float32) for key in names] for names in (OFF, LATER)
    )
    nothing = [np.zeros(4, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)]
    run_kernel(
        "process_logits",
        {"T": len(rows["positions"]), "S": 3, "R": 3},
        [
            logits,
            *rows.values(),
            np.zeros(3, np.int32),
            *columns,
            *nothing,
            np.full(3, -1, np.int32),
            np.zeros(0, np.uint32),
            *later,
        ],
        [(logits.shape, np.float32)],
        states=[history],
        numbers={"width": 100, "max_len": 100},
    )  # it ends, and reads and writes nothing it must not; the status of such rows is the sampler's to give


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of counters u64 [n, 4] (each below 2^32)."""
    c = [counter[:, i].astype(object) for i in range(4)]
    k = [int(key[0]), int(key[1])]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return np.stack(c, 1).astype(np.uint64)


def gumbel(vocabulary: int, seed: np.ndarray, position: int, branch: int) -> np.ndarray:
    counter = np.zeros((-(-vocabulary // 4), 4), np.uint64)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1], counter[:, 2] = position, branch
    u = (philox(counter, seed).reshape(-1)[:vocabulary] >> np.uint64(8)) * 2.0**-24 + 2.0**-25
    return -np.log(-np.log(u))


def test_philox_is_the_published_one() -> None:
    """The known answers of Random123's kat_vectors."""
    ones = 0xFFFFFFFF
    zero = philox(np.zeros((1, 4), np.uint64), np.zeros(2, np.uint32))
    assert [hex(w) for w in zero[0]] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    full = philox(np.full((1, 4), ones, np.uint64), np.full(2, ones, np.uint32))
    assert [hex(w) for w in full[0]] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


def run_sample(
    processed: np.ndarray,
    logits: np.ndarray,
    rows: dict[str, np.ndarray],
    history: np.ndarray,
    temperature: np.ndarray,
    seeds: np.ndarray,
    branches: np.ndarray,
    want: np.ndarray,
    candidates: np.ndarray | None = None,
    targets: np.ndarray | None = None,
    **options: object,
) -> list[np.ndarray]:
    count, most = len(logits), 5
    return run_kernel(
        "sample",
        {"T": len(rows["positions"]), "S": count, "R": count, "K": most},
        [processed, logits, *rows.values(), temperature, seeds, branches, want, candidates, targets],
        [((count,), np.int32)] * 2 + [((count,), np.float32), ((count, most), np.int32), ((count, most), np.float32)],
        states=[history],
        numbers={"width": logits.shape[1], "max_len": history.shape[1]},
        **options,
    )


@every_isa
@pytest.mark.parametrize("vocabulary", [6, 64, 1003, 9001])
@pytest.mark.parametrize("tied", [False, True])
def test_sample(isa: str, vocabulary: int, tied: bool) -> None:
    rng = np.random.default_rng()
    count = 8
    rows, history = rows_of_a_step(rng, count, vocabulary)
    logits = rng.standard_normal((count, vocabulary), np.float32) * 2
    if tied:
        logits = np.round(logits)
    temperature = np.array([0, 1, 1, 0, 1, 0, 1, 1], np.float32)
    processed = np.where(rng.random(logits.shape) < 0.3, -np.inf, logits).astype(np.float32)
    processed[:, 2] = logits[:, 2]
    logits[3, 1], logits[4, 5], processed[6] = np.nan, np.inf, -np.inf
    logits[0, 0] = processed[0, 0] = -np.inf
    seeds = rng.integers(0, 2**32, (count, 2), dtype=np.uint32)
    branches = rng.integers(0, 2**32, count, dtype=np.uint32)
    want = np.array([0, -1, 5, 3, 2, 5, 4, 1], np.int32)
    before = history.copy()
    tokens, status, logprob, top_ids, top = run_sample(
        processed, logits, rows, history, temperature, seeds, branches, want, isa=isa
    )
    assert status.tolist() == [0, 0, 0, 1, 1, 0, 2, 0]
    for r in range(count):
        position = int(rows["positions"][rows["rows"][r]]) + 1
        before[rows["seq_slots"][rows["token_seq"][rows["rows"][r]]], position] = tokens[r]
        wanted = 0
        if status[r] == 0:
            noise = gumbel(vocabulary, seeds[r], position, int(branches[r])) if temperature[r] else 0
            wanted = int(np.argmax(processed[r] + noise))
        assert tokens[r] == wanted
        n = want[r] if status[r] == 0 else -1
        raw = logits[r].astype(np.float64)
        if n >= 0:
            norm = raw.max() + np.log(np.exp(raw - raw.max()).sum())
            best = np.argsort(-raw, kind="stable")[:n]
            np.testing.assert_allclose(logprob[r], raw[tokens[r]] - norm, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(top_ids[r, :n], best)
            np.testing.assert_allclose(top[r, :n], raw[best] - norm, rtol=1e-6, atol=1e-6)
        else:
            assert logprob[r] == 0
        assert (top_ids[r, max(n, 0) :] == -1).all() and (top[r, max(n, 0) :] == 0).all()
    np.testing.assert_array_equal(history, before)


@every_isa
def test_sample_of_beams_and_targets(isa: str) -> None:
    rng = np.random.default_rng()
    count, vocabulary = 6, 5003
    rows, history = rows_of_a_step(rng, count, vocabulary)
    rows["rows"] = np.arange(count, dtype=np.int32)  # of some sequences several rows, of others none
    logits = rng.standard_normal((count, vocabulary), np.float32)
    processed = np.where(rng.random(logits.shape) < 0.5, -np.inf, np.round(logits, 2)).astype(np.float32)
    processed[2, 3:], processed[2, 1], processed[5] = -np.inf, 0.5, -np.inf  # fewer than are wanted, and none
    candidates = np.array([5, 0, 5, 2, 0, 0], np.int32)
    targets = np.array([-1, 17, -1, -1, -1, 4000], np.int32)
    before = history.copy()
    zeros = np.zeros(count, np.float32)
    common = (zeros, np.zeros((count, 2), np.uint32), np.zeros(count, np.uint32), np.full(count, 1, np.int32))
    tokens, status, logprob, top_ids, top = run_sample(
        processed, logits, rows, history, *common, candidates, targets, isa=isa
    )
    assert not status.any()
    sequences = rows["token_seq"].tolist()
    for r in range(count):
        wanted = targets[r] if targets[r] >= 0 else np.argmax(processed[r])
        assert tokens[r] == wanted
        if r not in [i for i in range(len(sequences) - 1) if sequences[i] == sequences[i + 1]]:
            before[rows["seq_slots"][sequences[r]], rows["positions"][r] + 1] = wanted
        source = processed[r] if candidates[r] else logits[r]
        best = np.argsort(-source, kind="stable")[: candidates[r] or 1]
        best = best[np.isfinite(source[best])]
        raw = logits[r].astype(np.float64)
        norm = raw.max() + np.log(np.exp(raw - raw.max()).sum())
        given = source[best] if candidates[r] else source[best] - norm
        np.testing.assert_array_equal(top_ids[r], [*best, *[-1] * (5 - len(best))])
        np.testing.assert_allclose(top[r], [*given, *[0] * (5 - len(best))], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(logprob[r], 0 if candidates[r] else raw[wanted] - norm, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(history, before)


@every_isa
def test_gumbel_noise_at_the_ends(isa: str) -> None:
    """Tokens whose noise is extreme among 2 million: compared as differences that decide between two tokens."""
    rng = np.random.default_rng()
    vocabulary = 200_000
    rows, history = rows_of_a_step(rng, 4, 40)
    seeds = rng.integers(0, 2**32, (4, 2), dtype=np.uint32)
    zeros = np.zeros((4, vocabulary), np.float32)
    common = (np.ones(4, np.float32), seeds, np.zeros(4, np.uint32), np.full(4, -1, np.int32))
    tokens, *_ = run_sample(zeros, zeros, rows, history, *common, isa=isa)
    for r in range(4):
        position = int(rows["positions"][rows["rows"][r]]) + 1
        assert tokens[r] == np.argmax(gumbel(vocabulary, seeds[r], position, 0))


@every_isa
def test_the_winner_among_flat_and_steep_logits(isa: str) -> None:
    """Noise that cannot win is not computed: the winner is that of all."""
    rng = np.random.default_rng()
    vocabulary, scales = 20_000, np.array([0.1, 1, 3, 30, 1e6, 1e30], np.float32)
    count = len(scales)
    rows, history = rows_of_a_step(rng, count, 40)
    seeds = rng.integers(0, 2**32, (count, 2), dtype=np.uint32)
    logits = (rng.standard_normal((count, vocabulary)) * scales[:, None]).astype(np.float32)
    common = (np.ones(count, np.float32), seeds, np.zeros(count, np.uint32), np.full(count, -1, np.int32))
    tokens, *_ = run_sample(logits, logits, rows, history, *common, isa=isa)
    for r in range(count):
        position = int(rows["positions"][rows["rows"][r]]) + 1
        assert tokens[r] == np.argmax(logits[r] + gumbel(vocabulary, seeds[r], position, 0))


@every_isa
def test_samples_follow_the_distribution(isa: str) -> None:
    rng = np.random.default_rng()
    count, vocabulary, rounds = 50, 5, 80
    chances = np.array([0.5, 0.2, 0.2, 0.1, 0.0])
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(chances), (count, vocabulary)).astype(np.float32)
    seen = np.zeros(vocabulary)
    rows, history = rows_of_a_step(rng, count, vocabulary)
    for _ in range(rounds):
        seeds = rng.integers(0, 2**32, (count, 2), dtype=np.uint32)
        common = (np.ones(count, np.float32), seeds, np.zeros(count, np.uint32), np.full(count, -1, np.int32))
        tokens, *_ = run_sample(logits, logits, rows, history, *common, isa=isa)
        seen += np.bincount(tokens, minlength=vocabulary)
    total = count * rounds
    assert seen[4] == 0
    deviation = np.sqrt(total * chances * (1 - chances))
    assert (np.abs(seen - total * chances) <= 6 * deviation).all()


@every_isa
def test_a_row_does_not_depend_on_the_step(isa: str) -> None:
    rng = np.random.default_rng()
    rows, history = rows_of_a_step(rng, 3, 9000)
    logits = rng.standard_normal((3, 9000), np.float32)
    seeds = rng.integers(0, 2**32, (3, 2), dtype=np.uint32)
    common = (np.ones(3, np.float32), seeds, np.zeros(3, np.uint32), np.full(3, 5, np.int32))
    whole = run_sample(logits, logits, rows, history.copy(), *common, isa=isa, threads=1)
    for threads in (2, 3):
        for a, b in zip(
            whole, run_sample(logits, logits, rows, history.copy(), *common, isa=isa, threads=threads), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    alone = {
        **{name: np.zeros(1, np.int32) for name in ("rows", "token_seq")},
        "positions": rows["positions"][rows["rows"][1:2]],
        "seq_slots": rows["seq_slots"][1:2],
    }
    ordered = {name: alone[name] for name in rows}
    single = run_sample(
        logits[1:2], logits[1:2], ordered, history.copy(), *(array[1:2] for array in common), isa=isa, threads=2
    )
    for a, b in zip(whole, single, strict=True):
        np.testing.assert_array_equal(a[1:2], b)
