"""What the case generators share, and ``evaluate``, which runs a case through its op's reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..backend.v1 import HOST_DTYPES, Array
from . import dtypes
from .spec import Case, Generator, OpSpec

_TAGS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

Weight = tuple[str, Array, tuple[int, ...]]


@dataclass(frozen=True)
class Batch:
    """Sequences of a step: i32 arrays as in STEP_INPUTS, and of its tokens the sequence and position, i32 [T]."""

    seq_slots: Array
    seq_starts: Array
    query_offsets: Array
    page_tables: tuple[Array, ...]
    blocks: tuple[int, ...]
    width: int
    token_seq: Array
    positions: Array

    def kv_slots(self, block_size: int) -> Array:
        """Where each token of the step lies in the first group's pool, i32 [T]."""
        blocks = self.page_tables[0][self.token_seq, self.positions // block_size]
        slots: Array = (blocks * block_size + self.positions % block_size).astype(np.int32)
        return slots


def random_batch(
    rng: Generator, starts: Sequence[int], lengths: Sequence[int], block_sizes: Sequence[int], slots: int
) -> Batch:
    """Sequences with ``starts`` tokens computed and ``lengths`` tokens in the step, in random slots and blocks.
    ``blocks`` is the size of each group's pool, of which some are in no table."""
    query_offsets = np.cumsum([0, *lengths]).astype(np.int32)
    token_seq = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = 1 + max((-(-max(ends) // size) for size in block_sizes), default=0)
    tables, blocks = [], []
    for size in block_sizes:
        needed = [-(-end // size) for end in ends]
        pool = sum(needed) + 3
        free = rng.permutation(np.arange(1, pool, dtype=np.int32))
        table = np.zeros((len(ends), width), np.int32)
        for seq, count in enumerate(needed):
            table[seq, :count], free = free[:count], free[count:]
        tables.append(table)
        blocks.append(pool)
    return Batch(
        seq_slots=rng.permutation(slots)[: len(ends)].astype(np.int32),
        seq_starts=np.array(starts, np.int32),
        query_offsets=query_offsets,
        page_tables=tuple(tables),
        blocks=tuple(blocks),
        width=width,
        token_seq=token_seq,
        positions=positions,
    )


def random_weight(rng: Generator, format_: str, shape: tuple[int, ...], deviation: float = 0.0) -> Weight:
    """Normal values of a deviation (0: 1 / sqrt of the last axis) as a case's weight, in format F32, F16 or BF16."""
    values = rng.standard_normal(shape, np.float32) * np.float32(deviation or shape[-1] ** -0.5)
    stored = dtypes.from_f32(values, _TAGS[format_])
    return format_, stored.reshape(prod(shape[:-1]), shape[-1]).view(np.uint8), shape


def random_activation(rng: Generator, format_: str, shape: tuple[int, ...]) -> Array:
    """Normal values f32 as a linear's x: bf16 numbers where the weight is BF16, since providers may round x to those."""
    values = rng.standard_normal(shape, np.float32)
    return dtypes.to_f32(dtypes.from_f32(values, "bf16"), "bf16") if format_ == "BF16" else values


def dense_weight(weight: Weight) -> Array:
    """The f32 values of a case's weight in format F32, F16 or BF16."""
    format_, rows, shape = weight
    tag = _TAGS[format_]
    return dtypes.to_f32(np.ascontiguousarray(rows).view(HOST_DTYPES[tag]), tag).reshape(shape)


def evaluate(
    spec: OpSpec, case: Case, dense: Callable[[Weight], Array] = dense_weight
) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """The reference's outputs for a case, and its states afterwards in the plain layout. The case is not changed.
    ``dense`` decodes its weights."""
    from .kv import plain_states  # kv takes its own cases from here

    states = {name: contents.copy() for name, contents in case.states.items()}
    if case.kv is not None:
        states = plain_states(case.kv, states)
    weights = {name: dense(weight) for name, weight in case.weights.items()}
    extra: dict[str, Any] = {"dims": case.dims} if spec.takes_dims else {}
    outputs = spec.reference(**spec.arguments({**case.inputs, **weights, **states}), **case.attrs, **extra)
    return outputs, states
