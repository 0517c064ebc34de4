"""Steps padded to the few sizes that a device names, so that what it has compiled for one step fits the next.

T goes to a bucket, and the other sizes follow from that or are one of a few. Where a device names sizes for decode steps alone,
those are padded with sequences of one token, and all others stay as they are. Padded tokens belong to sequences of their own
behind the true ones, whose pages are the null block and whose slot is the last of the history, which no sequence has. So
a padded step needs no masks: nothing of its padding is read by a true row, and its own rows are cut off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from ..backend.v1 import HOST_DTYPES, Array, Dims, Plan, StepInputs, StepResult

_FILLS: Mapping[str, float] = {
    "token_ids": -1,  # FROM_HISTORY: nothing is written there
    "top_p": 1,
    "typical_p": 1,
    "repetition_penalty": 1,
    "mask_rows": -1,
    "want_logprobs": -1,
}
"""What stands in padding where it is not 0. A padded row's target is token 0, so that nothing is chosen for it."""
_NULL_SLOT = ("seq_slots", "history_copies", "fill_slots")
_FIRST, _FACTOR = 16, 8
_WARMED = 1 << 16
"""Copies, fills and biases beyond this many in a step are not warmed up; hardly any step has them."""
_NARROW = 64
"""Page tables of up to so many blocks have one width."""


class Padding:
    """The sizes of a plan's steps."""

    def __init__(self, plan: Plan) -> None:
        self._limits = plan.limits
        self._buckets = _up_to(plan.buckets, plan.limits.dims.T)
        self._decodes = _up_to(plan.limits.decode_buckets, plan.limits.dims.S)
        self._widths = _widths(plan.limits.dims.P)
        self._slot = next((s.shape[0] - 1 for s in plan.states if s.kind == "history"), plan.limits.slots)
        self._block = min(block_sizes(plan), default=plan.limits.max_context)
        segments = (*plan.body, *plan.head)
        made = {value.id for segment in segments for bound in segment.calls for value in bound.call.outputs}
        inputs = [value for segment in segments for value in segment.inputs if value.id not in made]
        self._shapes = {value.name: value.shape for value in inputs}
        self._empty = {value.name: np.zeros(Dims().of(value.shape), HOST_DTYPES[value.dtype]) for value in inputs}
        self._outputs = {value.name: value.shape for segment in segments for value in segment.outputs}

    def sizes(self, dims: Dims) -> Dims:
        """The padded counts of a step. Those that have no maximum grow by factors of eight."""
        decodes = dims.T == dims.S and not dims.C + dims.H + dims.F
        buckets = self._decodes if decodes and max(self._decodes, default=0) >= dims.T else self._buckets
        if not buckets:
            return dims
        decodes = buckets is self._decodes
        return self._sizes(buckets[bisect_left(buckets, dims.T)], self._width(dims.P), dims, decodes)

    def pad(self, inputs: StepInputs) -> StepInputs:
        """The step with arrays of the padded sizes; they are new, those of the step stay."""
        sizes = self.sizes(inputs.dims)
        return inputs if sizes == inputs.dims else self._padded(inputs, sizes)

    def cut(self, result: StepResult, dims: Dims) -> StepResult:
        """Results of the true rows alone, values kept included; embeddings are as many as were asked for."""
        kept = {name: array[tuple(map(slice, dims.of(self._outputs[name])))] for name, array in result.values.items()}
        return StepResult(
            result.tokens[: dims.R],
            result.status[: dims.R],
            result.logprob[: dims.R],
            result.top_ids[: dims.R, : dims.K],
            result.top_logprobs[: dims.R, : dims.K],
            kept,
            result.embeddings,
        )

    def empty_steps(self) -> Iterator[StepInputs]:
        """Steps of nothing but padding: each T with each width of the page table, and with each size of what few steps have.
        What a device compiles of a step depends on one of these at a time, or it will compile more later. Decode steps come
        first, the largest before the others, so that memory that is kept for them is taken once."""
        for bucket in reversed(self._decodes):
            for width in reversed(self._widths):
                sizes = self._sizes(bucket, width, Dims(), decodes=True)
                yield self._padded(StepInputs(Dims(), self._empty), sizes)
        empty = StepInputs(Dims(), self._empty | {"embedding_rows": np.zeros(1, np.int32)})
        for bucket in self._buckets:
            for width in self._widths:
                yield self._padded(empty, self._sizes(bucket, width, Dims()))
            for more in self._rare(bucket):
                yield self._padded(empty, self._sizes(bucket, self._widths[0], Dims(**more)))

    def largest_steps(self) -> Iterator[StepInputs]:
        """The steps of nothing but padding that take the most memory: the largest decode step of a fixed size, and the largest of
        all, with as many rows, each with as many logprobs and masked, as there may be."""
        most = self._limits.dims
        rare = Dims(K=most.K, M=1)
        if self._decodes:
            yield self._padded(StepInputs(Dims(), self._empty), self._sizes(self._decodes[-1], most.P, rare, True))
        sequences, rows = min(most.S, most.T), min(most.R, most.T)
        largest = replace(most, S=sequences, R=rows, M=rows)
        if self._buckets:
            largest = self._sizes(self._buckets[-1], most.P, rare)
        hidden = {"embedding_rows": np.zeros(largest.R, np.int32)}
        yield self._padded(StepInputs(Dims(), self._empty | hidden), largest)

    # -- sizes -----------------------------------------------------------------------------------------------------

    def _rare(self, bucket: int) -> Iterator[dict[str, int]]:
        most = self._limits.dims
        for name, limit in (("K", most.K), ("B", _WARMED), ("M", 1)):
            yield from ({name: size} for size in _grades(limit))
        if bucket == self._buckets[0]:
            slots, context = self._limits.slots, self._limits.max_context
            for name, limit in (("C", most.S * most.P), ("H", slots), ("F", slots * context)):
                yield from ({name: size} for size in _grades(min(limit, _WARMED)))

    def _sizes(self, tokens: int, width: int, dims: Dims, decodes: bool = False) -> Dims:
        most = self._limits.dims
        rows = max(min(tokens, most.R), dims.R)  # also where the head does not run, since the body gathers them
        sequences = min(tokens, most.S) + ceil(tokens / self._room(width))
        return Dims(
            T=tokens,
            S=tokens if decodes else sequences + (sequences == tokens),  # as many as tokens says: one token each
            R=rows,
            P=width,
            C=_grade(dims.C),
            H=_grade(dims.H),
            F=_grade(dims.F),
            B=_grade(dims.B),
            M=rows if dims.M else 0,
            K=min(_grade(dims.K), max(most.K, dims.K)),
        )

    def _room(self, width: int) -> int:
        """The most tokens that a padded sequence can have, all of them in the null block."""
        return min(self._limits.max_context, width * self._block)

    def _width(self, width: int) -> int:
        return self._widths[min(bisect_left(self._widths, width), len(self._widths) - 1)]

    # -- arrays ----------------------------------------------------------------------------------------------------

    def _padded(self, inputs: StepInputs, sizes: Dims) -> StepInputs:
        dims = inputs.dims
        arrays = {name: self._filled(name, inputs.arrays[name], sizes) for name in self._shapes}
        arrays["query_offsets"][dims.S :] = self._offsets(dims, sizes)
        arrays["rows"][dims.R :] = _spare_token(dims, sizes, inputs.arrays["rows"])
        arrays["bias_offsets"][dims.R :] = dims.B
        if "embedding_rows" in inputs.arrays:  # padded where they run
            arrays["embedding_rows"] = inputs.arrays["embedding_rows"]
        return StepInputs(sizes, arrays)

    def _filled(self, name: str, array: Array, sizes: Dims) -> Array:
        fill = self._slot if name in _NULL_SLOT else _FILLS.get(name, 0)
        whole = np.full(sizes.of(self._shapes[name]), fill, array.dtype)
        whole[tuple(map(slice, array.shape))] = array
        return whole

    def _offsets(self, dims: Dims, sizes: Dims) -> Array:
        """Where the padded sequences begin, and the last one ends: the first ones have as many tokens as go into one."""
        room = 1 if sizes.S == sizes.T else self._room(sizes.P)
        ends = dims.T + room * np.arange(sizes.S - dims.S + 1)
        return np.minimum(ends, sizes.T).astype(np.int32)


def _spare_token(dims: Dims, sizes: Dims, rows: Array) -> int:
    """The token of padded rows: a padded one, or one that has no row. That may be the last of a prompt's part; what its row
    writes behind it in the history the prompt's next part writes over, before anything reads it."""
    if sizes.T > dims.T:
        return sizes.T - 1
    return int(np.setdiff1d(np.arange(dims.T), rows)[0]) if sizes.R > dims.R else 0


def _up_to(buckets: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Those that are needed where nothing is larger than ``most``."""
    return buckets[: bisect_left(buckets, most) + 1]


def _grade(count: int) -> int:
    """0, or the least of 16, 128, 1024 and so on that is no smaller."""
    size = _FIRST if count else 0
    while size < count:
        size *= _FACTOR
    return size


def _grades(most: int) -> Iterator[int]:
    """The sizes, other than 0, of what may be up to ``most``."""
    size = _FIRST
    while size < most * _FACTOR:
        yield size
        size *= _FACTOR


def _widths(most: int) -> tuple[int, ...]:
    """The widths of page tables: the widest, and quarters of it that are still wide, ascending."""
    found = [most]
    while found[-1] > _NARROW:
        found.append(ceil(found[-1] / 4))
    return tuple(reversed(found))


def block_sizes(plan: Plan) -> Sequence[int]:
    """Tokens of a block, a cache group, as the op that looks blocks up is told."""
    calls = (bound.call for segment in plan.body for bound in segment.calls)
    return next((call.attrs["block_sizes"] for call in calls if call.op == "step_expand"), ())


def common_buckets(named: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The sizes of T that all devices of a program have that name any, ascending."""
    sets = [set(buckets) for buckets in named if buckets]
    return tuple(sorted(set.intersection(*sets))) if sets else ()
