"""attention against a loop in f64, and its properties."""

import math
from dataclasses import replace

import numpy as np
import pytest

from engine.ops import OPS, evaluate
from engine.ops.attention import attention
from engine.ops.cases import dense_weight
from engine.ops.kv import plain_states, read_kv

SPEC = OPS["attention"]


def loop_attention(case):
    """One query and head at a time; a position's entry is looked up through the page table each time."""
    a, states = case.attrs, plain_states(case.kv, case.states)
    k = read_kv(states["k"], states.get("k_scale")).astype(np.float64)
    wide = a.get("v_head_dim", 0)
    v = k[..., :wide] if wide else read_kv(states["v"], states.get("v_scale")).astype(np.float64)
    group, size, dim = a["heads"] // a["kv_heads"], a["block_size"], a["head_dim"]
    window, softcap = a.get("window", 0), a.get("softcap", 0.0)
    sinks = dense_weight(case.weights["sinks"]) if case.weights else None
    offsets, out = case.inputs["query_offsets"], []
    for seq, table in enumerate(case.inputs["page_table"]):
        for row in range(offsets[seq], offsets[seq + 1]):
            p = case.inputs["seq_starts"][seq] + row - offsets[seq]
            end = p + 1 if a.get("causal", True) else case.inputs["seq_starts"][seq] + offsets[seq + 1] - offsets[seq]
            seen = [i for i in range(end) if not window or abs(i - p) < window]
            heads = []
            for h in range(a["heads"]):
                q = case.inputs["q"][row, h * dim : (h + 1) * dim].astype(np.float64)
                scores = [float(q @ k[table[i // size], i % size, h // group]) * a["scale"] for i in seen]
                if softcap:
                    scores = [softcap * math.tanh(s / softcap) for s in scores]
                beside = [] if sinks is None else [float(sinks[h])]
                most = max(scores + beside)
                weights = [math.exp(s - most) for s in scores]
                parts = [w * v[table[i // size], i % size, h // group] for w, i in zip(weights, seen, strict=True)]
                heads.append(sum(parts) / (sum(weights) + sum(math.exp(s - most) for s in beside)))
            out.append(np.concatenate(heads))
    return np.array(out)


def test_against_loops(rng):
    for case in SPEC.cases(rng):
        (got,), _ = evaluate(SPEC, case)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, loop_attention(case), rtol=1e-6, atol=1e-6, err_msg=case.name)


def test_cases_meet_the_shapes_that_matter():
    cases = list(SPEC.cases(np.random.default_rng(0)))
    assert {1, 2, 4, 8} <= {c.attrs["heads"] // c.attrs["kv_heads"] for c in cases}
    assert {"f32", "f16", "bf16", "int8", "int16", "fp8"} == {c.kv.dtype for c in cases}
    assert len({c.kv.block_size for c in cases}) >= 3
    mixed = [np.diff(c.inputs["query_offsets"]) for c in cases]
    assert any(min(n) == 1 and max(n) > 1 for n in mixed) and any(len(n) > 1 and max(n) == 1 for n in mixed)
    assert all(np.isnan(c.states["k"]).any() for c in cases)


def cases_of(rng, causal=True):
    return [case for case in SPEC.cases(rng) if case.attrs.get("causal", True) == causal]


def test_encoders_see_what_comes_later_in_their_own_text_alone(rng):
    """To the bit what a text gives by itself; a window's end lies where it says."""
    for case in cases_of(rng, causal=False):
        (whole,), _ = evaluate(SPEC, case)
        offsets, window = case.inputs["query_offsets"], case.attrs.get("window", 0)
        for seq, start in enumerate(case.inputs["seq_starts"]):
            rows = slice(offsets[seq], offsets[seq + 1])
            alone = {name: case.inputs[name][seq : seq + 1] for name in ("seq_starts", "page_table")}
            alone |= {"q": case.inputs["q"][rows], "query_offsets": np.array([0, rows.stop - rows.start], np.int32)}
            (one,), _ = evaluate(SPEC, replace(case, inputs=alone))
            assert one.tobytes() == whole[rows].tobytes()
            contents = {name: state.copy() for name, state in case.states.items()}
            place = divmod(int(start) + len(one) - 1, case.kv.block_size)
            contents["v"][case.inputs["page_table"][seq, place[0]], place[1]] += 7
            (other,), _ = evaluate(SPEC, replace(case, inputs=alone, states=contents))
            far = np.arange(len(one))[::-1] >= window if window else np.zeros(len(one), bool)
            assert ((one != other).any(axis=1) == ~far).all()


def test_causal(rng):
    """What a later token holds changes nothing before it."""
    for case in cases_of(rng):
        (before,), _ = evaluate(SPEC, case)
        size, offsets = case.kv.block_size, case.inputs["query_offsets"]
        contents = {name: state.copy() for name, state in case.states.items()}
        last = case.inputs["seq_starts"] + np.diff(offsets) - 1
        for seq, position in enumerate(last):
            place = case.inputs["page_table"][seq, position // size], position % size
            for state in contents.values():
                state[place] = 1000
        (after,), _ = evaluate(SPEC, replace(case, states=contents))
        ends = np.isin(np.arange(len(before)), offsets[1:] - 1)
        assert np.array_equal(before[~ends], after[~ends])
        assert (before[ends] != after[ends]).any(axis=1).all()


def test_window_hides_what_is_older(rng):
    for case in [c for c in cases_of(rng) if c.attrs.get("window", 0) > 1]:
        (before,), _ = evaluate(SPEC, case)
        start, table = case.inputs["seq_starts"][0], case.inputs["page_table"][0]
        oldest = start - case.attrs["window"] + 1
        for position, same in ((oldest - 1, True), (oldest, False)):
            contents = {name: state.copy() for name, state in case.states.items()}
            values = contents.get("v", contents["k"])
            values[table[position // case.kv.block_size], position % case.kv.block_size] += 7
            (after,), _ = evaluate(SPEC, replace(case, states=contents))
            assert np.array_equal(before[0], after[0]) == same


def test_chunks_and_company_change_no_bit(rng):
    """Each token of each sequence alone gives what the whole step gives."""
    for case in cases_of(rng):
        (whole,), _ = evaluate(SPEC, case)
        inputs = case.inputs
        for seq in range(case.dims.S):
            for row in range(*inputs["query_offsets"][seq : seq + 2]):
                alone = {
                    "q": inputs["q"][row : row + 1],
                    "seq_starts": inputs["seq_starts"][seq : seq + 1] + row - inputs["query_offsets"][seq],
                    "query_offsets": np.array([0, 1], np.int32),
                    "page_table": inputs["page_table"][seq : seq + 1],
                }
                (single,), _ = evaluate(SPEC, replace(case, inputs=alone))
                assert single.tobytes() == whole[row : row + 1].tobytes()


def test_block_size_and_place_change_no_bit(rng):
    n, heads, dim = 41, 2, 16
    k, v = rng.standard_normal((2, n, heads, dim), np.float32)
    q = rng.standard_normal((5, 4 * dim), np.float32)
    found = []
    for size in (1, 4, 16, 64):
        blocks = -(-n // size)
        table = 1 + rng.permutation(blocks).astype(np.int32)
        states = {name: np.full((blocks + 1, size, heads, dim), np.nan, np.float32) for name in ("k", "v")}
        for name, entries in (("k", k), ("v", v)):
            states[name][table[np.arange(n) // size], np.arange(n) % size] = entries
        (y,) = attention(
            q=q,
            seq_starts=np.array([n - 5], np.int32),
            query_offsets=np.array([0, 5], np.int32),
            page_table=table[None],
            **states,
            heads=4,
            kv_heads=heads,
            head_dim=dim,
            scale=0.25,
            block_size=size,
        )
        found.append(y.tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("group", [2, 4, 8])
def test_grouped_queries_are_repeated_heads(group, rng):
    case = next(c for c in SPEC.cases(rng) if c.kv.kv_heads == c.attrs["heads"] == 8)
    few = {name: state[:, :, : 8 // group] for name, state in case.states.items()}
    attrs = {**case.attrs, "kv_heads": 8 // group}
    (grouped,), _ = evaluate(SPEC, replace(case, states=few, attrs=attrs))
    many = {name: np.repeat(state, group, axis=2) for name, state in few.items()}
    (repeated,), _ = evaluate(SPEC, replace(case, states=many))
    np.testing.assert_allclose(grouped, repeated, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.03), ("int16", 5e-4)])
def test_a_cache_of_whole_numbers_is_near_f32(dtype, most, rng):
    for case in SPEC.cases(rng):
        if case.kv.dtype != dtype:
            continue
        (rough,), _ = evaluate(SPEC, case)
        (exact,), _ = evaluate(SPEC, replace(case, kv=replace(case.kv, dtype="f32")))
        error = np.sqrt(np.mean((rough - exact) ** 2) / np.mean(exact**2))
        assert 0 < error < most


def test_a_single_entry_is_its_value(rng):
    case = next(SPEC.cases(rng))
    (got,), _ = evaluate(SPEC, case)
    assert case.dims.T == 1
    assert np.array_equal(got.ravel(), case.states["v"][case.inputs["page_table"][0, 0], 0].ravel())
