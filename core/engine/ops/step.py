"""What opens a step (step_expand) and what joins body and head (gather_rows)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..backend.v1 import Array, Dims
from .cases import random_batch
from .inputs import FROM_HISTORY
from .spec import REQUIRED, Case, Generator, OpSpec


def step_expand(
    *,
    token_ids: Array,
    seq_slots: Array,
    seq_starts: Array,
    query_offsets: Array,
    history_copies: Array,
    fill_slots: Array,
    fill_positions: Array,
    fill_ids: Array,
    history: Array,
    block_sizes: Sequence[int],
    page_table: Sequence[Array] = (),
) -> tuple[Array, ...]:
    """Token ids, positions and KV slots of a step.

    History i32 [slots, max_len] takes, in this order, whole-row copies, fills, and the token ids that are known; ids
    given as FROM_HISTORY are read from it. Returns ids, positions and token_seq, i32 [T] each, then for each group
    kv_slots i32 [T] = table[seq, position // block_size] * block_size + position % block_size.
    """
    for source, destination in history_copies:
        history[destination] = history[source]
    for slot, position, token in zip(fill_slots, fill_positions, fill_ids, strict=True):
        history[slot, position] = token

    lengths = np.diff(query_offsets)
    token_seq = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    within = np.arange(len(token_ids), dtype=np.int32) - query_offsets[token_seq]
    positions = (seq_starts[token_seq] + within).astype(np.int32)

    slots = seq_slots[token_seq]
    known = token_ids != FROM_HISTORY
    history[slots[known], positions[known]] = token_ids[known]
    ids = history[slots, positions].astype(np.int32)

    kv_slots = (
        (table[token_seq, positions // size] * size + positions % size).astype(np.int32)
        for table, size in zip(page_table, block_sizes, strict=True)
    )
    return ids, positions, token_seq, *kv_slots


def gather_rows(*, x: Array, rows: Array) -> tuple[Array]:
    """x[rows]: [T, d] -> [R, d]."""
    return (x[rows],)


def step_expand_cases(rng: Generator) -> Iterator[Case]:
    shapes: list[tuple[str, list[int], list[int], tuple[int, ...], int, int]] = [
        # name, tokens computed before, query lengths, block sizes, history copies, fills
        ("one token", [0], [1], (16,), 0, 0),
        ("one long prompt", [0], [37], (16,), 0, 3),
        ("decodes", [5, 15, 16, 31], [1, 1, 1, 1], (16,), 2, 0),
        ("mixed, two groups", [7, 0, 12], [1, 9, 20], (4, 16), 1, 2),
        ("chunk inside a block", [3, 30], [2, 5], (32,), 0, 1),
        ("no cache group", [2, 0], [1, 4], (), 1, 1),
    ]
    for name, starts, lengths, block_sizes, copies, fills in shapes:
        slots, max_len = len(starts) + 3, 64
        batch = random_batch(rng, starts, lengths, block_sizes, slots)
        total = int(batch.query_offsets[-1])
        token_ids = rng.integers(0, 1000, total, dtype=np.int32)
        # Only a sequence that has run has a last token in its history.
        for seq, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if start and length == 1:
                token_ids[batch.query_offsets[seq]] = FROM_HISTORY
        inputs = {
            "token_ids": token_ids,
            "seq_slots": batch.seq_slots,
            "seq_starts": batch.seq_starts,
            "query_offsets": batch.query_offsets,
            "history_copies": np.stack([rng.choice(slots, 2, replace=False) for _ in range(copies)]).astype(np.int32)
            if copies
            else np.zeros((0, 2), np.int32),
            "fill_slots": rng.integers(0, slots, fills, dtype=np.int32),
            "fill_positions": rng.permutation(max_len)[:fills].astype(np.int32),
            "fill_ids": rng.integers(0, 1000, fills, dtype=np.int32),
        }
        inputs |= {f"page_table.{group}": table for group, table in enumerate(batch.page_tables)}
        yield Case(
            name,
            Dims(T=total, S=len(starts), P=batch.width, H=copies, F=fills),
            inputs,
            states={"history": rng.integers(0, 1000, (slots, max_len), dtype=np.int32)},
            attrs={"block_sizes": block_sizes},
        )


def gather_rows_cases(rng: Generator) -> Iterator[Case]:
    for tokens, rows, width in ((1, 1, 64), (9, 3, 32), (33, 33, 16), (20, 1, 288), (4, 0, 8)):
        yield Case(
            f"{rows} of {tokens} tokens",
            Dims(T=tokens, R=rows),
            {
                "x": rng.standard_normal((tokens, width), np.float32),
                "rows": np.sort(rng.permutation(tokens)[:rows]).astype(np.int32),
            },
        )


SPECS = (
    OpSpec(
        "step_expand",
        inputs=(
            "token_ids",
            "seq_slots",
            "seq_starts",
            "query_offsets",
            "history_copies",
            "fill_slots",
            "fill_positions",
            "fill_ids",
            "page_table*",
        ),
        outputs=("ids", "positions", "token_seq", "kv_slots*"),
        states=("history",),
        attrs={"block_sizes": REQUIRED},
        reference=step_expand,
        cases=step_expand_cases,
    ),
    OpSpec(
        "gather_rows",
        inputs=("x", "rows"),
        outputs=("y",),
        reference=gather_rows,
        cases=gather_rows_cases,
    ),
)
