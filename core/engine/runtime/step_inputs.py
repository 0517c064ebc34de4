"""From a scheduled step to the arrays that the device takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..backend.v1 import Array, Dims, StepInputs
from ..kv import BlockTable
from ..scheduler import ScheduledSequence, ScheduledStep
from .head_inputs import HeadArrays, HeadInputs, RowParams

I32 = np.int32
_NO_FILLS = {name: np.zeros(0, I32) for name in ("fill_slots", "fill_positions", "fill_ids")}


class Row(NamedTuple):
    """A row of the head: the sequence whose next token it gives, or, at ``position``, the prompt token whose logprob it
    gives. ``guessed``: how many guessed tokens are before it."""

    seq_id: int
    position: int | None = None
    guessed: int = 0


@dataclass(frozen=True)
class Rows:
    """What the rows of a step's head are for. ``next``: the row of the last known token of each sequence that gets its next
    one; ``plain``: there is nothing but these."""

    each: tuple[Row, ...]
    next: Mapping[int, int]
    plain: bool = False


class _HeadRow(NamedTuple):
    """A row on its way into the arrays: the index of its token in the step, and how many tokens of the sequence are known
    before the one it gives (None: it gives none)."""

    token: int
    row: Row
    params: RowParams
    known: int | None


class StepArrays:
    """Makes the arrays of steps. Most steps have the sequences of the one before, each with its next token, so what is the
    same is not made again; nobody writes to what is given."""

    def __init__(self, groups: int, head: HeadInputs) -> None:
        self._head = head
        self._tables = [_Tables() for _ in range(groups)]
        self._seq_ids: list[int] = []
        self._rows = Rows((), {}, True)

    def of(self, step: ScheduledStep, row_params: Callable[[int], RowParams]) -> tuple[StepInputs, Rows]:
        """The arrays, and what each row is for."""
        parts, count = step.sequences, len(step.sequences)
        arrays: dict[str, Array] = {
            "seq_slots": np.array([part.slot for part in parts], I32),
            "seq_starts": np.array([part.start for part in parts], I32),
            "history_copies": np.array(step.history_copies, I32).reshape(-1, 2),
        }
        rows, asked = (self._plain if step.plain else self._mixed)(arrays, step, row_params)
        arrays |= asked.arrays
        width = max((len(table) for part in parts for table in part.tables), default=1)
        for g, tables in enumerate(self._tables):
            arrays[f"page_table.{g}"] = tables.of([part.tables[g] for part in parts], width)
        dims = Dims(
            T=step.num_tokens,
            S=count,
            R=len(rows.each),
            P=width,
            C=_copies(arrays, step, len(self._tables)),
            H=len(step.history_copies),
            F=_fills(arrays, step),
            B=asked.biased,
            K=asked.wanted,
            M=asked.masked,
        )
        return StepInputs(dims, arrays), rows

    def _plain(
        self, arrays: dict[str, Array], step: ScheduledStep, row_params: Callable[[int], RowParams]
    ) -> tuple[Rows, HeadArrays]:
        """A plain step's tokens and rows, of which each sequence has one."""
        parts = step.sequences
        seq_ids = [part.seq_id for part in parts]
        if seq_ids != self._seq_ids:
            self._seq_ids = seq_ids
            self._rows = Rows(tuple(map(Row, seq_ids)), {seq_id: n for n, seq_id in enumerate(seq_ids)}, True)
        arrays["token_ids"] = np.array([part.token_ids[0] for part in parts], I32)
        arrays["query_offsets"] = np.arange(len(parts) + 1, dtype=I32)
        arrays["rows"] = np.arange(len(parts), dtype=I32)
        known = [part.start + 1 for part in parts]
        return self._rows, self._head.of([row_params(seq_id) for seq_id in seq_ids], known)

    def _mixed(
        self, arrays: dict[str, Array], step: ScheduledStep, row_params: Callable[[int], RowParams]
    ) -> tuple[Rows, HeadArrays]:
        """Any step's tokens and rows, and the hidden states that are wanted."""
        parts = step.sequences
        offsets = np.zeros(len(parts) + 1, I32)
        np.cumsum([part.num_tokens for part in parts], out=offsets[1:])
        firsts = offsets[:-1].tolist()
        rows = [row for part, first in zip(parts, firsts, strict=True) for row in _rows(part, first, row_params)]
        arrays["token_ids"] = np.fromiter((i for part in parts for i in part.token_ids), I32, step.num_tokens)
        arrays["query_offsets"] = offsets
        arrays["rows"] = np.array([row.token for row in rows], I32)
        embedded = [
            first + n - part.start for part, first in zip(parts, firsts, strict=True) for n in range(*part.embedded)
        ]
        if embedded:
            arrays["embedding_rows"] = np.array(embedded, I32)
        each = tuple(row.row for row in rows)
        following = {row.seq_id: n for n, row in enumerate(each) if row.position is None and not row.guessed}
        return Rows(each, following), self._head.of([row.params for row in rows], [row.known for row in rows])


def _rows(part: ScheduledSequence, first: int, row_params: Callable[[int], RowParams]) -> Iterator[_HeadRow]:
    """The rows of a sequence whose first token is token ``first`` of the step."""
    if not part.emits and part.scored[0] == part.scored[1]:
        return
    params = row_params(part.seq_id)
    for position in range(*part.scored):
        row = Row(part.seq_id, position + 1)
        yield _HeadRow(first + position - part.start, row, params.scoring(position + 1), None)
    if part.emits:
        last = part.num_tokens - part.guessed - 1
        for n in range(part.guessed + 1):
            yield _HeadRow(first + last + n, Row(part.seq_id, None, n), params, part.start + last + n + 1)


class _Tables:
    """The page table of a cache group; rows whose blocks are the same object as in the step before are copied from there."""

    def __init__(self) -> None:
        self._given: list[BlockTable] = []
        self._array = np.zeros((0, 1), I32)

    def of(self, given: list[BlockTable], width: int) -> Array:
        array = np.zeros((len(given), width), I32)
        changed: Iterable[int] = range(len(given))
        before = self._given if len(given) == len(self._given) else None
        if before is not None:
            both = min(width, self._array.shape[1])
            array[:, :both] = self._array[:, :both]
            changed = [n for n, (new, old) in enumerate(zip(given, before, strict=True)) if new is not old]
        for n in changed:
            table = given[n]
            array[n, : len(table)] = table
            if before is not None and len(before[n]) > len(table):
                array[n, len(table) :] = 0
        self._given, self._array = given, array
        return array


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
