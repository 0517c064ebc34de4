"""sample: its draws, its statistics, its logprobs and its status."""

import math

import numpy as np
import pytest

from engine.backend.v1 import Dims
from engine.ops import OPS, evaluate
from engine.ops.head import FULLY_MASKED, NON_FINITE, OK, gumbel, log_softmax, sample

SPEC = OPS["sample"]


def draw(
    processed, logits=None, temperature=1.0, seeds=None, branches=0, positions=4, want=-1, width=0, max_len=16, **more
):
    """Rows that are sequences of one token each; row r has slot r. Returns the op's outputs and the history."""
    processed = np.asarray(processed, np.float32)
    count = len(processed)
    history = np.full((count, max_len), -7, np.int32)
    outputs = sample(
        processed=processed,
        logits=processed if logits is None else np.asarray(logits, np.float32),
        rows=np.arange(count, dtype=np.int32),
        positions=np.broadcast_to(np.asarray(positions, np.int32), count),
        token_seq=np.arange(count, dtype=np.int32),
        seq_slots=np.arange(count, dtype=np.int32),
        temperature=np.full(count, temperature, np.float32),
        seeds=np.zeros((count, 2), np.uint32) if seeds is None else seeds,
        branches=np.broadcast_to(np.asarray(branches, np.uint32), count),
        want_logprobs=np.full(count, want, np.int32),
        history=history,
        **{name: np.broadcast_to(np.asarray(value, np.int32), count) for name, value in more.items()},
        dims=Dims(T=count, S=count, R=count, K=width),
    )
    return (*outputs, history)


def plain_uniform(seed, position, branch, token):
    c, k = [token // 4, position, branch, 0], [int(word) for word in seed]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (c[token % 4] >> 8) * 2.0**-24 + 2.0**-25


def test_cases_against_the_definition(rng):
    for case in SPEC.cases(rng):
        (tokens, status, logprob, top_ids, top_logprobs), states = evaluate(SPEC, case)
        i, history = case.inputs, case.states["history"].copy()
        for r, t in enumerate(i["rows"]):
            raw, values = i["logits"][r].astype(np.float64), i["processed"][r].astype(np.float64)
            position = int(i["positions"][t]) + 1
            left = [v for v in range(len(values)) if math.isfinite(values[v])]
            bad = any(math.isnan(v) or v == math.inf for v in raw)
            target = int(i["targets"][r]) if "targets" in i else -1
            beams = int(i["candidates"][r]) if "candidates" in i else 0
            assert status[r] == (NON_FINITE if bad else OK if target >= 0 else FULLY_MASKED if not left else OK)
            want = 0
            if status[r] == OK:
                scores = {v: values[v] for v in left}
                if i["temperature"][r]:
                    for v in left:
                        u = plain_uniform(i["seeds"][r], position, int(i["branches"][r]), v)
                        scores[v] -= math.log(-math.log(u))
                want = target if target >= 0 else min(left, key=lambda v: (-scores[v], v))
            assert tokens[r] == want
            if position < history.shape[1] and i["token_seq"].tolist()[t:].count(i["token_seq"][t]) == 1:
                history[i["seq_slots"][i["token_seq"][t]], position] = want
            wanted = int(i["want_logprobs"][r])
            if beams and status[r] == OK:
                best = sorted(left, key=lambda v: (-values[v], v))[:beams]
                assert top_ids[r].tolist() == best + [-1] * (case.dims.K - len(best)) and logprob[r] == 0
                np.testing.assert_array_equal(top_logprobs[r], [*values[best], *[0] * (case.dims.K - len(best))])
                continue
            if status[r] != OK:
                assert logprob[r] == 0 and (top_ids[r] == -1).all() and not top_logprobs[r].any()
                continue
            logprobs = raw - raw.max() - math.log(math.fsum(np.exp(raw - raw.max())))
            assert logprob[r] == (pytest.approx(logprobs[want], abs=1e-5) if wanted >= 0 else 0)
            best = sorted(range(len(raw)), key=lambda v: (-raw[v], v))[: max(wanted, 0)]
            assert top_ids[r].tolist() == best + [-1] * (case.dims.K - len(best))
            np.testing.assert_allclose(top_logprobs[r], [*logprobs[best], *[0] * (case.dims.K - len(best))], atol=1e-5)
        assert np.array_equal(states["history"], history)


def test_greedy_takes_the_lowest_id_on_ties():
    tokens, *_ = draw([[1, 3, 3, 2], [-np.inf, -5, -np.inf, -5], [0, 0, 0, 0]], temperature=0.0)
    assert tokens.tolist() == [1, 1, 0]


def test_targets_are_not_chosen():
    nothing = np.full((2, 4), -np.inf)
    tokens, status, logprob, *_, history = draw(nothing, np.zeros((2, 4)), want=0, targets=[3, -1])
    assert tokens.tolist() == [3, 0] and status.tolist() == [OK, FULLY_MASKED]
    np.testing.assert_allclose(logprob, [-math.log(4), 0], rtol=1e-6)
    assert history[0, 5] == 3


def test_draws_follow_the_softmax():
    """Chi-square at 0.1 % of 20 thousand draws: over seeds, positions and branches."""
    logits = np.array([1.5, 0, -1, 2, 0.5, -2, 1, -np.inf, 0.25, -0.5], np.float32)
    expected = np.exp(logits) / np.exp(logits).sum()
    number = np.arange(12_000, dtype=np.uint32)
    fixed = np.broadcast_to(np.array([12345, 678], np.uint32), (4000, 2))
    for changed in (
        {"seeds": np.stack([number, number // 7], axis=1)},
        {"seeds": fixed, "positions": number[:4000]},
        {"seeds": fixed, "branches": number[:4000]},
    ):
        n = len(changed["seeds"])
        tokens, status, *_ = draw(np.broadcast_to(logits, (n, 10)), **changed)
        counts = np.bincount(tokens, minlength=10)
        assert not status.any() and counts[7] == 0
        allowed = expected > 0
        chi_square = ((counts - n * expected)[allowed] ** 2 / (n * expected[allowed])).sum()
        assert chi_square < 26.12  # 8 degrees of freedom


def test_noise_is_gumbel():
    noise = np.concatenate([gumbel(np.array([s, 1], np.uint32), 3, np.uint32(0), 5000) for s in range(20)])
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.02)


@pytest.mark.parametrize("change", [{"positions": 5}, {"branches": 1}, {"seeds": np.array([[0, 1]], np.uint32)}])
def test_each_coordinate_changes_the_draw(change):
    flat = np.zeros((1, 5000))
    assert draw(flat)[0] != draw(flat, **change)[0]
    assert draw(flat)[0] == draw(flat)[0]


def test_a_row_draws_the_same_alone_and_over_a_larger_vocabulary(rng):
    processed = rng.standard_normal((6, 50), np.float32)
    seeds = rng.integers(0, 2**32, (6, 2), dtype=np.uint32)
    together = draw(processed, seeds=seeds)[0]
    alone = [draw(processed[r : r + 1], seeds=seeds[r : r + 1])[0][0] for r in range(6)]
    wider = np.concatenate([processed, np.full((6, 13), -np.inf, np.float32)], axis=1)
    assert together.tolist() == alone == draw(wider, seeds=seeds)[0].tolist()


def test_status():
    processed = [[0, 1, 2], [0, 1, np.nan], [0, np.inf, 2], [-np.inf] * 3, [0, -np.inf, 2], [0, 1, 2]]
    logits = [[0, 1, 2], [0, 1, np.nan], [0, np.inf, 2], [0, 1, 2], [0, -np.inf, 2], [np.nan] * 3]
    for temperature in (0.0, 1.0):
        tokens, status, logprob, top_ids, _, history = draw(processed, logits, temperature, want=1, width=1)
        assert status.tolist() == [OK, NON_FINITE, NON_FINITE, FULLY_MASKED, OK, NON_FINITE]
        failed = status != OK
        assert not tokens[failed].any() and not logprob[failed].any() and (top_ids[failed] == -1).all()
        assert np.array_equal(history[:, 5], tokens)
        assert (np.delete(history, 5, axis=1) == -7).all()


def test_history_that_is_full_is_left():
    *_, history = draw([[0, 1]], positions=15)
    assert (history == -7).all()


def test_logprobs_are_of_the_raw_logits_and_only_where_wanted(rng):
    raw = rng.standard_normal((1, 30), np.float32)
    banned = np.where(np.arange(30) == raw.argmax(), -np.inf, raw * 3)
    tokens, _, logprob, top_ids, top_logprobs, _ = draw(banned, raw, 0.0, want=2, width=4)
    assert tokens[0] == np.argsort(-raw[0])[1]
    assert top_ids[0].tolist() == [*np.argsort(-raw[0])[:2], -1, -1]
    assert logprob[0] == top_logprobs[0, 1] and top_logprobs[0, 2:].tolist() == [0, 0]
    none = draw(banned, raw, 0.0, want=-1, width=4)
    assert none[2][0] == 0 and (none[3] == -1).all()
    only_own = draw(banned, raw, 0.0, want=0, width=4)
    assert only_own[2][0] == logprob[0] and (only_own[3] == -1).all()


def test_log_softmax_sums_to_one(rng):
    raw = rng.standard_normal(1000).astype(np.float32) * 50
    raw[3] = -np.inf
    assert np.exp(log_softmax(raw)).sum() == pytest.approx(1)
    assert log_softmax(np.array([1e4, 0], np.float32)).tolist() == [0, -1e4]
