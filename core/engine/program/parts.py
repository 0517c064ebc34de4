"""Rectangles of a weight as weights of their own: what one rank holds. Nothing is read before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..backend.v1 import Array, WeightRef
from ..errors import ConfigError
from ..formats import FORMATS
from .weights import ConstantWeight, DerivedWeight, of_matrices

Span = tuple[int, int]
"""From, and up to but without."""


@dataclass(frozen=True)
class RowPart(DerivedWeight):
    """Rows ``span`` of a matrix [N, K], or of each matrix of [E, N, K]."""

    span: Span

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, _, depth = self.source.shape
        return (*leading, self.span[1] - self.span[0], depth)

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A view where one matrix is asked for, else a copy."""
        pieces = []
        for matrix, low, high in of_matrices(self.shape, start, stop):
            first = matrix * self.source.shape[-2] + self.span[0]
            pieces.append(self.source.rows(first + low, first + high))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense()[..., slice(*self.span), :])


@dataclass(frozen=True)
class ColumnPart(DerivedWeight):
    """Columns ``span`` of a weight, whole blocks of its format."""

    span: Span

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.source.shape[:-1], self.span[1] - self.span[0])

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy of the rows asked for, made anew each time."""
        low, high = (FORMATS[self.format].row_bytes(column) for column in self.span)
        return np.ascontiguousarray(self.source.rows(start, stop)[:, low:high])

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense()[..., slice(*self.span)])


@dataclass(frozen=True)
class MatrixPart(DerivedWeight):
    """Matrices ``span`` of a weight [heads, N, K]."""

    span: Span

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.span[1] - self.span[0], *self.source.shape[1:])

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        count, first = self.source.shape[1], self.span[0] * self.source.shape[1]
        last = self.span[1] * count if stop is None else min(first + stop, self.span[1] * count)
        return self.source.rows(first + start, last)

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense()[slice(*self.span)])


def row_part(weight: WeightRef, span: Span) -> WeightRef:
    return RowPart(_named(weight, "rows", span), weight, span)


def matrix_part(weight: WeightRef, span: Span) -> WeightRef:
    return MatrixPart(_named(weight, "heads", span), weight, span)


def column_part(weight: WeightRef, span: Span) -> WeightRef:
    """ConfigError where the columns do not fall on the format's blocks."""
    block = FORMATS[weight.format].block
    if any(column % block for column in span):
        raise ConfigError(
            f"{weight.name} is stored in {weight.format} blocks of {block} columns, and a split at column {span[0] or span[1]}"
            " would cut one; choose another tensor_parallel_size."
        )
    return ColumnPart(_named(weight, "columns", span), weight, span)


def entries(weight: WeightRef, span: Span) -> WeightRef:
    """Entries of a vector, or of each row of few vectors; they are read at once."""
    return ConstantWeight(_named(weight, "entries", span), np.ascontiguousarray(weight.dense()[..., slice(*span)]))


def of_first_rank(weight: WeightRef, rank: int) -> WeightRef:
    """What is added once to a sum over ranks: the weight on rank 0, zeros on the others."""
    return weight if rank == 0 else ConstantWeight(weight.name, np.zeros(weight.shape, np.float32))


def _named(weight: WeightRef, what: str, span: Span) -> str:
    return f"{weight.name}[{what} {span[0]}:{span[1]}]"
