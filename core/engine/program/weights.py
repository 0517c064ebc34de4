"""Weights as references: mapped tensors with lazy concatenation and slicing of rows, and constants worked out at load."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ..backend.v1 import Array
from ..errors import ModelError
from ..formats import Tensor


@dataclass(frozen=True)
class MappedWeight:
    """Rows of one or several mapped tensors of one format, one below the other, seen in ``shape``."""

    name: str
    tensors: tuple[Tensor, ...]
    shape: tuple[int, ...]

    @property
    def format(self) -> str:
        return self.tensors[0].format.name

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        total = prod(self.shape[:-1])
        stop = total if stop is None else stop
        pieces, first = [], 0
        for tensor in self.tensors:
            rows = tensor.rows()
            low, high = max(start - first, 0), min(stop - first, len(rows))
            if low < high:
                pieces.append(rows[low:high])
            first += len(rows)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def dense(self) -> Array:
        return np.concatenate([t.dense().reshape(-1, self.shape[-1]) for t in self.tensors]).reshape(self.shape)


@dataclass(frozen=True)
class ConstantWeight:
    """An f32 array worked out at load, such as rope frequencies."""

    name: str
    array: Array
    format: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        flat = np.ascontiguousarray(self.array, np.float32).reshape(-1, self.array.shape[-1])
        return flat[start:stop].view(np.uint8)

    def dense(self) -> Array:
        return np.asarray(self.array, np.float32)


def stack(name: str, tensors: tuple[Tensor, ...]) -> MappedWeight:
    """Tensors of one shape and format as [count, N, K]."""
    _same_format(name, tensors)
    return MappedWeight(name, tensors, (len(tensors), *tensors[0].shape))


def single(name: str, tensor: Tensor) -> MappedWeight:
    return MappedWeight(name, (tensor,), tensor.shape)


def _same_format(name: str, tensors: tuple[Tensor, ...]) -> None:
    kinds = {(t.format.name, t.shape) for t in tensors}
    if len(kinds) != 1:
        raise ModelError(
            f"The tensors of {name} differ in shape or format ({sorted(map(str, kinds))}); they must be alike."
        )
