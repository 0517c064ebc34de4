"""From a scheduled step to the arrays that the device takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..backend.v1 import Array, Dims, StepInputs
from ..scheduler import ScheduledSequence, ScheduledStep
from .head_inputs import HeadInputs, RowParams

I32 = np.int32
_NO_FILLS = {name: np.zeros(0, I32) for name in ("fill_slots", "fill_positions", "fill_ids")}


class Row(NamedTuple):
    """A row of the head: the sequence whose next token it gives, or, at ``position``, the prompt token whose logprob it
    gives. ``guessed``: how many guessed tokens are before it."""

    seq_id: int
    position: int | None = None
    guessed: int = 0


class _HeadRow(NamedTuple):
    """A row on its way into the arrays: the index of its token in the step, and how many tokens of the sequence are known
    before the one it gives (None: it gives none)."""

    token: int
    row: Row
    params: RowParams
    known: int | None


def step_inputs(
    step: ScheduledStep, row_params: Callable[[int], RowParams], groups: int, head: HeadInputs
) -> tuple[StepInputs, tuple[Row, ...]]:
    """The arrays, and what each row is for."""
    parts = step.sequences
    counts = np.array([part.count for part in parts], I32)
    offsets = np.zeros(len(parts) + 1, I32)
    np.cumsum(counts, out=offsets[1:])
    rows = [row for part, first in zip(parts, offsets.tolist(), strict=False) for row in _rows(part, first, row_params)]
    arrays: dict[str, Array] = {
        "token_ids": np.fromiter((i for part in parts for i in part.token_ids), I32, step.num_tokens),
        "seq_slots": np.array([part.slot for part in parts], I32),
        "seq_starts": np.array([part.start for part in parts], I32),
        "query_offsets": offsets,
        "rows": np.array([row.token for row in rows], I32),
        "history_copies": np.array(step.history_copies, I32).reshape(-1, 2),
    }
    hidden = [
        first + n - part.start
        for part, first in zip(parts, offsets.tolist(), strict=False)
        for n in range(*part.embedded)
    ]
    if hidden:
        arrays["embedding_rows"] = np.array(hidden, I32)
    width = max((len(table) for part in parts for table in part.tables), default=1)
    for g in range(groups):
        arrays[f"page_table.{g}"] = _tables([part.tables[g] for part in parts], width)
    copies = _copies(arrays, step, groups)
    fills = _fills(arrays, step)
    asked = head.of([row.params for row in rows], [row.known for row in rows])
    arrays |= asked.arrays
    dims = Dims(
        T=step.num_tokens,
        S=len(parts),
        R=len(rows),
        P=width,
        C=copies,
        H=len(step.history_copies),
        F=fills,
        B=asked.biased,
        K=asked.wanted,
        M=asked.masked,
    )
    return StepInputs(dims, arrays), tuple(row.row for row in rows)


def _rows(part: ScheduledSequence, first: int, row_params: Callable[[int], RowParams]) -> Iterator[_HeadRow]:
    """The rows of a sequence whose first token is token ``first`` of the step."""
    if not part.emits and part.scored[0] == part.scored[1]:
        return
    params = row_params(part.seq_id)
    for position in range(*part.scored):
        row = Row(part.seq_id, position + 1)
        yield _HeadRow(first + position - part.start, row, params.scoring(position + 1), None)
    if part.emits:
        last = part.count - part.guessed - 1
        for n in range(part.guessed + 1):
            yield _HeadRow(first + last + n, Row(part.seq_id, None, n), params, part.start + last + n + 1)


def _tables(tables: Sequence[Sequence[int]], width: int) -> Array:
    result = np.zeros((len(tables), width), I32)
    for row, table in zip(result, tables, strict=True):
        row[: len(table)] = table
    return result


def _copies(arrays: dict[str, Array], step: ScheduledStep, groups: int) -> int:
    """All groups get arrays of one length; the null block copied onto itself changes nothing."""
    most = max((len(pairs) for pairs in step.block_copies), default=0)
    for g in range(groups):
        pairs = np.zeros((most, 2), I32)
        given = step.block_copies[g] if g < len(step.block_copies) else ()
        if given:
            pairs[: len(given)] = given
        arrays[f"block_copies.{g}"] = pairs
    return most


def _fills(arrays: dict[str, Array], step: ScheduledStep) -> int:
    fills = step.history_fills
    if not fills:
        arrays |= _NO_FILLS
        return 0
    total = sum(len(ids) for _, ids in fills)
    arrays["fill_slots"] = np.fromiter((slot for slot, ids in fills for _ in ids), I32, total)
    arrays["fill_positions"] = np.fromiter((n for _, ids in fills for n in range(len(ids))), I32, total)
    arrays["fill_ids"] = np.fromiter((i for _, ids in fills for i in ids), I32, total)
    return total
