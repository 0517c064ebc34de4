"""A step's beginning: step_expand."""

from __future__ import annotations

import mlx.core as mx

from ..operands import Operands

FROM_HISTORY = -1


def step_expand(o: Operands) -> tuple[mx.array, ...]:
    tokens = o.dims.T
    history = o.state("history")
    copies, fills = o["history_copies"], (o["fill_slots"], o["fill_positions"])
    for n in range(o.dims.H):  # a copy may read what the one before it has written
        history[copies[n, 1]] = history[copies[n, 0]]
    if o.dims.F:
        history[fills] = o["fill_ids"]

    offsets, ids = o["query_offsets"], o["token_ids"]
    rows = mx.arange(tokens)
    token_seq = (rows[:, None] >= offsets[None, 1:]).sum(axis=1).astype(mx.int32)
    positions = o["seq_starts"][token_seq] + rows - offsets[token_seq]
    place = o["seq_slots"][token_seq], positions
    ids = mx.where(ids == FROM_HISTORY, history[place], ids)
    history[place] = ids
    o.put_state("history", history)

    kv_slots = []
    for group, size in enumerate(o.attr("block_sizes")):
        table = o[f"page_table.{group}"]
        kv_slots.append(table[token_seq, positions // size] * size + positions % size)
    return tuple(value.astype(mx.int32) for value in (ids, positions, token_seq, *kv_slots))
