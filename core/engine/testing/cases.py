"""Cases for providers: the catalogue's, the same with weights in every stored format, and parts of a case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ..backend.v1 import Array
from ..formats import FORMATS
from ..ops import Case, OpSpec
from ..program.weights import MappedWeight
from ..quantize.encode import encodable, encode_rows

Stored = tuple[str, Array, tuple[int, ...]]

MATRICES = ("linear", "linear_group", "moe_linear", "moe_linear_group")
"""Ops whose matrices come in every format of a checkpoint."""
_PLAIN = ("F32", "F16", "BF16")
_WIDTH = 256  # a whole block of any format


class CaseWeight(MappedWeight):
    """A case's weight as a provider gets it: raw rows of a format."""

    def __init__(self, name: str, stored: Stored) -> None:
        format_, rows, shape = stored
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_stored", (format_, rows))
        object.__setattr__(self, "shape", tuple(shape))

    @property
    def format(self) -> str:
        return str(self._stored[0])

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        return np.ascontiguousarray(self._stored[1])[start:stop]

    def dense(self) -> Array:
        decoded: Array = FORMATS[self.format].decode(self.rows())
        return decoded.reshape(self.shape)

    def release(self) -> None:
        """It is no part of a file."""

    _stored: tuple[str, Array]


class _Inline(Executor):
    """Runs what it is given at once: a case's weights are small."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def formats() -> tuple[str, ...]:
    """The formats that a random weight can be written in."""
    return tuple(name for name in FORMATS if encodable(name))


def random_weight(rng: np.random.Generator, format_: str, shape: tuple[int, ...]) -> Stored:
    """A weight whose values do not matter, in any format: bytes of which no number is subnormal or infinite."""
    rows = rng.integers(32, 64, (prod(shape[:-1]), FORMATS[format_].row_bytes(shape[-1])), np.uint8)
    return format_, rows, shape


def all_cases(spec: OpSpec, rng: np.random.Generator) -> Iterator[Case]:
    """The op's cases, and for matrices one more a stored format. Two passes give the same cases with other numbers."""
    if spec.cases is None:
        return
    yield from spec.cases(rng)
    if spec.name in (*MATRICES, "embed"):
        for format_ in formats():
            if format_ not in _PLAIN:
                yield from _in_format(spec, format_, rng)


def _in_format(spec: OpSpec, format_: str, rng: np.random.Generator) -> Iterator[Case]:
    """A case of a single row and one of several, with matrices of whole blocks."""
    for rows, outputs in ((1, 64), (9, 96)):
        matrix = rng.standard_normal((outputs, _WIDTH), np.float32) * np.float32(_WIDTH**-0.5)
        shapes: Mapping[str, tuple[int, ...]] = {"weight": (outputs, _WIDTH)}
        if spec.name == "linear_group":
            shapes = {"weight.0": (outputs, _WIDTH), "weight.1": (outputs // 2, _WIDTH)}
        if spec.name == "moe_linear":
            shapes = {"weight": (4, outputs // 4, _WIDTH)}
        if spec.name == "moe_linear_group":
            shapes = {f"weight.{n}": (4, outputs // 4, _WIDTH) for n in range(2)}
        weights = {
            name: (format_, encode_rows(format_, matrix[: prod(shape[:-1])], None, _Inline()), shape)
            for name, shape in shapes.items()
        }
        x = rng.standard_normal((rows, _WIDTH), np.float32)
        inputs: dict[str, Array] = {"x": x}
        attrs: dict[str, Any] = {}
        if spec.name == "embed":
            inputs = {"ids": rng.integers(0, outputs, rows, dtype=np.int32)}
        if spec.name.startswith("moe_linear"):
            inputs["ids"] = np.stack([rng.permutation(4)[:2] for _ in range(rows)]).astype(np.int32)
        if spec.name == "moe_linear":
            attrs = {"per_choice": False}
        plain = next(iter(spec.cases(rng))) if spec.cases else None
        assert plain is not None
        dims = replace(plain.dims, **{name: 0 for name in "SRPCHFBMK"}, T=rows)
        yield Case(f"{format_} {rows}x{_WIDTH} to {outputs}", dims, inputs, weights, attrs=attrs)


def like(first: Case, other: Case) -> Case | None:
    """``other``'s inputs and states with ``first``'s weights and attributes, or None if their shapes differ."""

    def shapes(case: Case) -> Any:
        return (
            {n: a.shape for n, a in case.inputs.items()},
            {n: a.shape for n, a in case.states.items()},
            case.dims,
            case.kv,
        )

    if shapes(first) != shapes(other):
        return None
    return replace(other, weights=first.weights, attrs=first.attrs)


def independent_rows(case: Case) -> int:
    """How many rows a case has that are computed each by itself, from nothing but themselves; 0 where it has states,
    sequences, or two kinds of rows."""
    dims = case.dims
    rows = dims.T or dims.R
    if case.states or dims.S or (dims.T and dims.R) or not rows:
        return 0
    return rows if all(len(a) % rows == 0 for a in case.inputs.values()) else 0


def some_rows(case: Case, rows: list[int]) -> Case:
    """The case with only these of its rows."""
    total = independent_rows(case)
    inputs = {name: np.ascontiguousarray(a[row_index(len(a) // total, rows)]) for name, a in case.inputs.items()}
    dims = replace(case.dims, T=len(rows)) if case.dims.T else replace(case.dims, R=len(rows))
    return replace(case, name=f"{case.name}, rows {rows}", inputs=inputs, dims=dims)


def row_index(each: int, rows: list[int]) -> Array:
    """Where ``rows`` lie in an array that has ``each`` entries a row."""
    return np.concatenate([np.arange(row * each, (row + 1) * each) for row in rows]).astype(np.intp)


def spoiled(case: Case, row: int, rng: np.random.Generator) -> Case | None:
    """The case with NaN and infinities in one row of each f32 input, or None where there is no such input."""
    total = independent_rows(case)
    found = {name: a.copy() for name, a in case.inputs.items() if a.dtype == np.float32 and a.size}
    if not found:
        return None
    for array in found.values():
        own = array.reshape(total, -1)[row]
        own[rng.integers(0, len(own))] = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32))
    return replace(case, inputs={**case.inputs, **found})
