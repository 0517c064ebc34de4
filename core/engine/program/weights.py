"""Weights as references: mapped tensors with lazy concatenation, choice and transposition of rows, and constants worked
out at load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ..backend.v1 import Array, WeightRef
from ..errors import ModelError
from ..formats import ANY_INPUT, FORMATS, InputSpec, Tensor


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
            count = prod(tensor.shape[:-1])
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                pieces.append(tensor.rows(low, high))
            first += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def dense(self) -> Array:
        return np.concatenate([t.dense().reshape(-1, self.shape[-1]) for t in self.tensors]).reshape(self.shape)

    def release(self) -> None:
        for tensor in self.tensors:
            tensor.release()


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

    def release(self) -> None:
        """It is no part of a file."""


@dataclass(frozen=True)
class DerivedWeight:
    """What is made of another weight, in its format."""

    name: str
    source: WeightRef

    @property
    def format(self) -> str:
        return self.source.format

    def release(self) -> None:
        self.source.release()


def of_matrices(shape: tuple[int, ...], start: int, stop: int | None) -> Iterator[tuple[int, int, int]]:
    """(matrix, first row, end) of a weight [..., N, K] that rows ``start`` to ``stop`` of the flattened leading axes fall on."""
    count, total = shape[-2], prod(shape[:-1])
    stop = total if stop is None else min(stop, total)
    for matrix in range(start // count, -(-stop // count)):
        yield matrix, max(start - matrix * count, 0), min(stop - matrix * count, count)


@dataclass(frozen=True)
class SelectedWeight(DerivedWeight):
    """Some rows of a matrix, in any order, as a weight of its own: a part of a fused projection. ``index`` is a slice with
    both ends, which stays a view of the file, or an integer array [N]."""

    index: slice | Array

    @property
    def shape(self) -> tuple[int, ...]:
        count = self.index.stop - self.index.start if isinstance(self.index, slice) else len(self.index)
        return (count, self.source.shape[1])

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        if isinstance(self.index, slice):
            return self.source.rows(self.index.start + start, self.index.start + stop)
        chosen: Array = self.source.rows()[self.index[start:stop]]
        return chosen

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense()[self.index])


@dataclass(frozen=True)
class HeadWeight(DerivedWeight):
    """The rows ``part`` of each head's ``size`` rows of a matrix [heads * size, K], as [heads, N, K]. ``part`` is a slice
    with both ends."""

    heads: int
    size: int
    part: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.heads, self.part.stop - self.part.start, self.source.shape[1])

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy, put together from the heads that the rows asked for belong to."""
        pieces = []
        for head, low, high in of_matrices(self.shape, start, stop):
            first = head * self.size + self.part.start
            pieces.append(self.source.rows(first + low, first + high))
        return np.concatenate(pieces)

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense().reshape(self.heads, self.size, -1)[:, self.part])


@dataclass(frozen=True)
class TransposedHeadWeight(DerivedWeight):
    """The matrices [heads, N, K] of a weight turned over: [heads, K, N]. Blocks cannot be turned, so a quantized one is
    decoded, to F32."""

    source: HeadWeight

    @property
    def format(self) -> str:
        return self.source.format if FORMATS[self.source.format].block == 1 else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        heads, n, k = self.source.shape
        return (heads, k, n)

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy of the rows asked for, made anew each time from the heads that they belong to."""
        heads, k, n = self.shape
        stop = heads * k if stop is None else stop
        first, last = start // k, -(-stop // k)
        stored = self.source.rows(first * n, last * n)
        if self.format != self.source.format:
            stored = FORMATS[self.source.format].decode(stored).view(np.uint8)
        turned = stored.reshape(last - first, n, k, -1).swapaxes(1, 2).reshape((last - first) * k, -1)
        return np.ascontiguousarray(turned[start - first * k : stop - first * k])

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense().swapaxes(1, 2))


@dataclass(frozen=True)
class TransposedWeight(DerivedWeight):
    """A stored matrix [K, N] as [N, K]. Blocks cannot be transposed, so the format is one without."""

    source: MappedWeight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[::-1]

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy of the rows asked for, made anew each time."""
        width = self.source.tensors[0].format.block_bytes
        numbers = self.source.rows().reshape(*self.source.shape, width)
        flipped = np.ascontiguousarray(numbers[:, start:stop].swapaxes(0, 1))
        return flipped.reshape(len(flipped), -1)

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense().T)


def input_spec(ref: WeightRef) -> InputSpec:
    """What a matrix asks of its input. ModelError for stacked tensors that ask for different things."""
    if isinstance(ref, SelectedWeight):
        return input_spec(ref.source)
    if not isinstance(ref, MappedWeight):
        return ANY_INPUT
    first = ref.tensors[0].input
    if any(t.input.quantized != first.quantized or t.input.scale != first.scale for t in ref.tensors) or (
        len(ref.tensors) > 1 and any(t.input.columns is not None for t in ref.tensors)
    ):
        raise ModelError(
            f"The tensors of {ref.name} take their inputs in different orders or steps (act-order, static activation scales);"
            " these are supported for single matrices, not for experts."
        )
    return first


def stored_bytes(ref: WeightRef) -> int:
    """Bytes of a weight in its file's format."""
    return prod(ref.shape[:-1]) * FORMATS[ref.format].row_bytes(ref.shape[-1])


def select(name: str, source: WeightRef, index: slice | Array) -> SelectedWeight | ConstantWeight:
    """Rows of a matrix, or entries of a vector (which are few, and read at once). ModelError when the source has fewer."""
    last = index.stop if isinstance(index, slice) else int(index.max()) + 1
    if len(source.shape) > 2 or last > source.shape[0]:
        raise ModelError(
            f"{source.name} has the shape {list(source.shape)}, but {name} needs {last} rows of it; the checkpoint is"
            " inconsistent."
        )
    if len(source.shape) == 1:
        return ConstantWeight(name, np.ascontiguousarray(source.dense()[index]))
    return SelectedWeight(name, source, index)


def of_heads(name: str, source: WeightRef, heads: int, size: int, part: slice) -> HeadWeight:
    """Rows of each head's part of a matrix. ModelError when the matrix has not ``size`` rows a head, or asks for more of its
    input than one linear can give."""
    if len(source.shape) != 2 or source.shape[0] != heads * size:
        raise ModelError(
            f"{source.name} has the shape {list(source.shape)}, but {heads} heads of {size} rows are needed; the checkpoint is"
            " inconsistent."
        )
    asked = input_spec(source)
    if asked.columns is not None or asked.scale:
        raise ModelError(
            f"{source.name} has its columns in another order or a static activation scale (act-order, W8A8), which a matrix"
            " that is applied head by head cannot have."
        )
    return HeadWeight(name, source, heads, size, part)


def row_matrix(weight: WeightRef) -> WeightRef:
    """A vector as a matrix of one row; a matrix as it is."""
    return ConstantWeight(weight.name, weight.dense()[None]) if len(weight.shape) == 1 else weight


def transposed(weight: MappedWeight) -> TransposedWeight:
    """The matrix turned over. ModelError for one that is stored in blocks."""
    if len(weight.shape) != 2 or weight.tensors[0].format.block != 1:
        raise ModelError(
            f"{weight.name} is stored as {weight.format} {list(weight.shape)}; a matrix that lies transposed in its file must"
            " be F32, F16 or BF16."
        )
    return TransposedWeight(weight.name, weight)


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
