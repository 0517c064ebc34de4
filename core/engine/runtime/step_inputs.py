"""From a scheduled step to the arrays that the device takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..backend.v1 import Array, Dims, StepInputs
from ..sampling import SamplingParams
from ..sampling.grammar import Matcher
from ..sampling.processors import Bias
from ..scheduler import ScheduledSequence, ScheduledStep

I32, F32, U32 = np.int32, np.float32, np.uint32
NO_BIAS: Bias = (np.zeros(0, I32), np.zeros(0, F32))
SCORING = SamplingParams(temperature=0.0)


class Row(NamedTuple):
    """A row of the head: the sequence whose next token it gives, or, at ``position``, the prompt token whose logprob it
    gives. ``guessed``: how many guessed tokens are before it."""

    seq_id: int
    position: int | None = None
    guessed: int = 0


@dataclass(frozen=True)
class RowParams:
    """What the head needs of a sequence, worked out once.

    ``banned`` are the ids that may not come before ``min_tokens``; ``want`` is how many best logprobs are given beside
    the token's own, -1 for none; ``candidates`` a beam's, 0 if it is none; ``prompt_ids`` are there where the prompt is
    scored.
    """

    params: SamplingParams
    prompt_length: int
    branch: int
    seed: int
    banned: tuple[int, ...] = ()
    bias: Bias = NO_BIAS
    matcher: Matcher | None = None
    want: int = -1
    candidates: int = 0
    prompt_ids: tuple[int, ...] = ()
    target: int = -1

    def scoring(self, position: int) -> RowParams:
        """The row whose logprob is that of the prompt token at ``position``."""
        want = self.params.prompt_logprobs
        assert want is not None
        return RowParams(
            SCORING, self.prompt_length, self.branch, self.seed, want=want, target=self.prompt_ids[position]
        )

    def with_bias(self, more: Sequence[Bias]) -> RowParams:
        ids, values = zip(self.bias, *more, strict=True)
        return replace(self, bias=(np.concatenate(ids), np.concatenate(values)))

    def biased(self, known: int) -> Bias:
        """What is added to the logits of the token after ``known`` ones."""
        only_ends = self.matcher is not None and self.matcher.only_ends
        if only_ends or known - self.prompt_length >= self.params.min_tokens:
            return self.bias
        ids, values = self.bias
        banned = np.array(self.banned, I32)
        return np.concatenate([ids, banned]), np.concatenate([values, np.full(len(banned), -np.inf, F32)])


class _HeadRow(NamedTuple):
    """A row on its way into the arrays: the index of its token in the step, and how many tokens of the sequence are known
    before the one it gives (None: it gives none)."""

    token: int
    row: Row
    params: RowParams
    known: int | None


def step_inputs(
    step: ScheduledStep, row_params: Callable[[int], RowParams], groups: int, mask_words: int
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
    params = [row.params for row in rows]
    masks = _masks(arrays, params, mask_words)  # first: it tells which texts can only end
    bias = _biases(arrays, [NO_BIAS if row.known is None else row.params.biased(row.known) for row in rows])
    _sampling(arrays, params)
    wanted = max(arrays[name].max(initial=0) for name in ("want_logprobs", "candidates"))
    dims = Dims(
        T=step.num_tokens,
        S=len(parts),
        R=len(rows),
        P=width,
        C=copies,
        H=len(step.history_copies),
        F=fills,
        B=bias,
        K=int(wanted),
        M=masks,
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
    total = sum(len(ids) for _, ids in fills)
    arrays["fill_slots"] = np.fromiter((slot for slot, ids in fills for _ in ids), I32, total)
    arrays["fill_positions"] = np.fromiter((n for _, ids in fills for n in range(len(ids))), I32, total)
    arrays["fill_ids"] = np.fromiter((i for _, ids in fills for i in ids), I32, total)
    return total


def _sampling(arrays: dict[str, Array], rows: Sequence[RowParams]) -> None:
    def column(values: Sequence[float], dtype: type[np.generic]) -> Array:
        return np.array(values, dtype)

    params = [row.params for row in rows]
    arrays["prompt_lengths"] = column([row.prompt_length for row in rows], I32)
    arrays["branches"] = column([row.branch for row in rows], U32)
    arrays["seeds"] = np.array([(row.seed & 0xFFFFFFFF, row.seed >> 32) for row in rows], U32).reshape(-1, 2)
    arrays["want_logprobs"] = column([row.want for row in rows], I32)
    arrays["candidates"] = column([row.candidates for row in rows], I32)
    arrays["targets"] = column([row.target for row in rows], I32)
    for name in ("top_k", "no_repeat_ngram_size"):
        arrays[name] = column([getattr(p, name) for p in params], I32)
    for name in _F32_PARAMS:
        arrays[name] = column([getattr(p, name) for p in params], F32)


_F32_PARAMS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def _masks(arrays: dict[str, Array], rows: Sequence[RowParams], words: int) -> int:
    """A mask for each row that has a grammar, in its state after the last token."""
    matchers = [row.matcher for row in rows]
    arrays["mask_rows"] = np.full(len(rows), -1, I32)
    having = [n for n, matcher in enumerate(matchers) if matcher is not None]
    arrays["mask_rows"][having] = np.arange(len(having), dtype=I32)
    arrays["masks"] = np.zeros((len(having), words), U32)
    for n, mask in zip(having, arrays["masks"], strict=True):
        if (matcher := matchers[n]) is not None:
            matcher.fill(mask)
    return len(having)


def _biases(arrays: dict[str, Array], rows: Sequence[Bias]) -> int:
    offsets = np.zeros(len(rows) + 1, I32)
    np.cumsum([len(ids) for ids, _ in rows], out=offsets[1:])
    arrays["bias_offsets"] = offsets
    ids, values = zip(NO_BIAS, *(bias for bias in rows if len(bias[0])), strict=True)
    arrays["bias_ids"], arrays["bias_values"] = np.concatenate(ids), np.concatenate(values)
    return int(offsets[-1])
