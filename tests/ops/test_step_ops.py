"""step_expand and gather_rows."""

import numpy as np
import pytest

from engine.ops import FROM_HISTORY, OPS, evaluate
from engine.ops.step import step_expand


def expand(history, token_ids, starts, lengths, slots, copies=(), fills=(), tables=(), sizes=()):
    return step_expand(
        token_ids=np.array(token_ids, np.int32),
        seq_slots=np.array(slots, np.int32),
        seq_starts=np.array(starts, np.int32),
        query_offsets=np.cumsum([0, *lengths]).astype(np.int32),
        history_copies=np.array(copies, np.int32).reshape(-1, 2),
        fill_slots=np.array([f[0] for f in fills], np.int32),
        fill_positions=np.array([f[1] for f in fills], np.int32),
        fill_ids=np.array([f[2] for f in fills], np.int32),
        page_table=[np.array(t, np.int32) for t in tables],
        history=history,
        block_sizes=sizes,
    )


def test_against_loops(rng):
    for case in OPS["step_expand"].cases(rng):
        (ids, positions, token_seq, *kv_slots), states = evaluate(OPS["step_expand"], case)
        i, history = case.inputs, [row.tolist() for row in case.states["history"]]
        for source, destination in i["history_copies"]:
            history[destination] = list(history[source])
        for slot, position, token in zip(i["fill_slots"], i["fill_positions"], i["fill_ids"], strict=True):
            history[slot][position] = int(token)
        token = 0
        for seq, slot in enumerate(i["seq_slots"]):
            for position in range(i["seq_starts"][seq], i["seq_starts"][seq] + np.diff(i["query_offsets"])[seq]):
                if i["token_ids"][token] != FROM_HISTORY:
                    history[slot][position] = int(i["token_ids"][token])
                assert ids[token] == history[slot][position]
                assert (positions[token], token_seq[token]) == (position, seq)
                for group, size in enumerate(case.attrs["block_sizes"]):
                    block = i[f"page_table.{group}"][seq, position // size]
                    assert kv_slots[group][token] == block * size + position % size
                token += 1
        assert token == len(ids) == case.dims.T
        assert len(kv_slots) == len(case.attrs["block_sizes"])
        assert np.array_equal(states["history"], history)
        assert all(a.dtype == np.int32 for a in (ids, positions, token_seq, *kv_slots))


def test_copies_come_before_fills_and_fills_before_tokens():
    history = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]], np.int32)
    ids, *_ = expand(
        history,
        token_ids=[FROM_HISTORY, 70, 80, FROM_HISTORY],
        starts=[1, 0],
        lengths=[1, 3],
        slots=[2, 1],
        copies=[(0, 1), (1, 2)],  # the second takes what the first brought
        fills=[(2, 1, 50), (1, 0, 60), (1, 2, 61)],
    )
    assert ids.tolist() == [50, 70, 80, 61]
    assert history.tolist() == [[1, 2, 3, 4], [70, 80, 61, 4], [1, 50, 3, 4]]


def test_later_fills_win():
    history = np.zeros((1, 2), np.int32)
    assert expand(history, [FROM_HISTORY], [0], [1], [0], fills=[(0, 0, 4), (0, 0, 9)])[0].tolist() == [9]


def test_a_sequence_without_tokens():
    history = np.zeros((3, 4), np.int32)
    ids, positions, token_seq = expand(history, [7, 8], [2, 1, 0], [1, 0, 1], [0, 1, 2])
    assert token_seq.tolist() == [0, 2] and positions.tolist() == [2, 0] and ids.tolist() == [7, 8]
    assert not history[1].any()


@pytest.mark.parametrize("sizes", [(4,), (2, 8)])
def test_kv_slots_follow_each_group_s_table(sizes):
    tables = [[[3, 1, 2, 5, 4]], [[9, 8, 7, 6, 5]]][: len(sizes)]
    _, _, _, *slots = expand(np.zeros((1, 9), np.int32), [1, 2, 3], [3], [3], [0], tables=tables, sizes=sizes)
    expected = {(4,): [[15, 4, 5]], (2, 8): [[3, 4, 5], [75, 76, 77]]}
    assert [s.tolist() for s in slots] == expected[sizes]


def test_gather_rows(rng):
    for case in OPS["gather_rows"].cases(rng):
        (got,), _ = evaluate(OPS["gather_rows"], case)
        assert got.shape == (case.dims.R, case.inputs["x"].shape[1])
        assert all(np.array_equal(y, case.inputs["x"][row]) for y, row in zip(got, case.inputs["rows"], strict=True))
