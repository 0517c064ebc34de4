"""From a scheduled step to the arrays that the device takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..backend.v1 import Array, Dims, StepInputs
from ..sampling import SamplingParams
from ..sampling.grammar import Matcher
from ..scheduler import ScheduledSequence, ScheduledStep

I32, F32, U32 = np.int32, np.float32, np.uint32


@dataclass(frozen=True)
class RowParams:
    """What the head needs of a sequence, worked out once: ``banned`` are the ids that may not come before
    ``min_tokens``."""

    params: SamplingParams
    prompt_length: int
    branch: int
    seed: int
    banned: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = field(default=())
    matcher: Matcher | None = None

    @property
    def want(self) -> int:
        return -1 if self.params.logprobs is None else self.params.logprobs


def step_inputs(
    step: ScheduledStep, row_params: Callable[[int], RowParams], groups: int, mask_words: int
) -> tuple[StepInputs, tuple[int, ...]]:
    """The arrays, and the sequence id of each row."""
    parts = step.sequences
    counts = np.array([part.count for part in parts], I32)
    offsets = np.zeros(len(parts) + 1, I32)
    np.cumsum(counts, out=offsets[1:])
    emitting = [n for n, part in enumerate(parts) if part.emits]
    arrays: dict[str, Array] = {
        "token_ids": np.fromiter((i for part in parts for i in part.token_ids), I32, step.num_tokens),
        "seq_slots": np.array([part.slot for part in parts], I32),
        "seq_starts": np.array([part.start for part in parts], I32),
        "query_offsets": offsets,
        "rows": offsets[1:][emitting] - 1,
        "history_copies": np.array(step.history_copies, I32).reshape(-1, 2),
    }
    width = max((len(table) for part in parts for table in part.tables), default=1)
    for g in range(groups):
        arrays[f"page_table.{g}"] = _tables([part.tables[g] for part in parts], width)
    copies = _copies(arrays, step, groups)
    fills = _fills(arrays, step)
    rows = [parts[n] for n in emitting]
    params = [row_params(part.seq_id) for part in rows]
    masks = _masks(arrays, params, mask_words)  # first: it tells which texts are complete
    bias = _sampling(arrays, rows, params)
    wanted = int(arrays["want_logprobs"].max(initial=0))
    dims = Dims(
        T=step.num_tokens,
        S=len(parts),
        R=len(rows),
        P=width,
        C=copies,
        H=len(step.history_copies),
        F=fills,
        B=bias,
        K=wanted,
        M=masks,
    )
    return StepInputs(dims, arrays), tuple(part.seq_id for part in rows)


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


def _sampling(arrays: dict[str, Array], parts: Sequence[ScheduledSequence], rows: Sequence[RowParams]) -> int:
    def column(values: Sequence[float], dtype: type[np.generic]) -> Array:
        return np.array(values, dtype)

    params = [row.params for row in rows]
    arrays["prompt_lengths"] = column([row.prompt_length for row in rows], I32)
    arrays["branches"] = column([row.branch for row in rows], U32)
    arrays["seeds"] = np.array([(row.seed & 0xFFFFFFFF, row.seed >> 32) for row in rows], U32).reshape(-1, 2)
    arrays["want_logprobs"] = column([row.want for row in rows], I32)
    arrays["top_k"] = column([p.top_k for p in params], I32)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        arrays[name] = column([getattr(p, name) for p in params], F32)
    entries = [_bias(part, row) for part, row in zip(parts, rows, strict=True)]
    arrays["bias_offsets"] = np.concatenate([np.zeros(1, I32), np.cumsum([len(e) for e in entries], dtype=I32)]).astype(
        I32
    )
    flat = [pair for entry in entries for pair in entry]
    arrays["bias_ids"] = column([i for i, _ in flat], I32)
    arrays["bias_values"] = column([b for _, b in flat], F32)
    return len(flat)


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


def _bias(part: ScheduledSequence, row: RowParams) -> Sequence[tuple[int, float]]:
    done = part.start + part.count - row.prompt_length
    if done >= row.params.min_tokens or (row.matcher is not None and row.matcher.complete):
        return row.bias
    return (*row.bias, *((token, -np.inf) for token in row.banned))
