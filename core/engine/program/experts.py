"""Experts' weights, and parts of those that a file keeps in one tensor, as weights [experts, N, K] of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backend.v1 import Array, WeightRef
from ..errors import ModelError
from ..formats import FORMATS
from .weights import DerivedWeight, of_matrices


@dataclass(frozen=True)
class Experts:
    """Stacked expert weights: gate and up [E, mlp, embed], down [E, embed, mlp], biases [E, N], and the attributes of
    ``gated_act`` between them. Without a gate, up is its own."""

    gate: WeightRef | None
    up: WeightRef
    down: WeightRef
    gate_bias: WeightRef | None = None
    up_bias: WeightRef | None = None
    down_bias: WeightRef | None = None
    act: Mapping[str, Any] = field(default_factory=lambda: {"kind": "silu"})


@dataclass(frozen=True)
class _ExpertPart(DerivedWeight):
    """``part`` of each expert's outputs, with a positive step."""

    part: slice


class ExpertRows(_ExpertPart):
    """Of a weight [experts, M, K] a part of each expert's rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, depth = self.source.shape
        return (experts, len(range(rows)[self.part]), depth)

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy of the rows asked for, made anew each time."""
        count = self.source.shape[1]
        chosen, found = range(count)[self.part], []
        for expert, low, high in of_matrices(self.shape, start, stop):
            first, last = (expert * count + chosen[row] for row in (low, high - 1))
            found.append(self.source.rows(first, last + 1)[:: chosen.step])
        return np.concatenate(found)

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense()[:, self.part])


class TurnedExperts(_ExpertPart):
    """Of a tensor [experts, K, M] a part of each expert's columns, as its rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        experts, depth, columns = self.source.shape
        return (experts, len(range(columns)[self.part]), depth)

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy of the rows asked for, made anew each time."""
        width = FORMATS[self.format].block_bytes
        stored = self.source.rows().reshape(*self.source.shape, width)
        found = [
            np.ascontiguousarray(stored[expert, :, self.part][:, low:high].swapaxes(0, 1))
            for expert, low, high in of_matrices(self.shape, start, stop)
        ]
        return np.concatenate(found).reshape(-1, self.shape[2] * width)

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense()[:, :, self.part].swapaxes(1, 2))


class TurnedFp8(TurnedExperts):
    """The same of FP8, whose scales are those of square blocks: 32 neighbours of a column have one, too."""

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy of the rows asked for, made anew each time. ModelError where scales differ within a new block."""
        depth, columns = self.source.shape[1], np.arange(self.source.shape[2])[self.part]
        form = FORMATS["FP8"]
        found = []
        for expert, low, high in of_matrices(self.shape, start, stop):
            stored = self.source.rows(expert * depth, (expert + 1) * depth).reshape(depth, -1, form.block_bytes)
            own = columns[low:high]
            codes = stored[..., 4:].reshape(depth, -1)[:, own].T.reshape(len(own), -1, form.block)
            scales = stored[:, own // form.block, :4].reshape(-1, form.block, len(own), 4)
            if (scales != scales[:, :1]).any():
                raise ModelError(
                    f"{self.source.name} lies transposed, with scales that differ within {form.block} of its inputs; supported"
                    f" are scales of blocks of {form.block} by {form.block} or more."
                )
            found.append(np.concatenate([scales[:, 0].swapaxes(0, 1), codes], axis=-1).reshape(len(own), -1))
        return np.concatenate(found)


def expert_rows(name: str, source: WeightRef, part: slice) -> ExpertRows:
    """ModelError for what is no weight of several experts, or has none of these rows."""
    if len(source.shape) != 3 or not range(source.shape[1])[part]:
        raise ModelError(f"{source.name} has the shape {list(source.shape)}; it must be [experts, outputs, inputs].")
    return ExpertRows(name, source, part)


def turned_experts(name: str, source: WeightRef, part: slice) -> TurnedExperts:
    """ModelError for what is no such tensor, or is stored in blocks, of which FP8's alone can be turned."""
    fp8 = source.format == "FP8" and len(source.shape) == 3 and source.shape[1] % FORMATS["FP8"].block == 0
    whole = fp8 or (len(source.shape) == 3 and source.format in ("F32", "F16", "BF16"))
    if not whole or not range(source.shape[2])[part]:
        raise ModelError(
            f"{source.name} is stored as {source.format} {list(source.shape)}; experts that lie transposed in their file must"
            " be F32, F16, BF16 or FP8 [experts, inputs, outputs], in FP8 with a multiple of 32 inputs."
        )
    return (TurnedFp8 if fp8 else TurnedExperts)(name, source, part)
