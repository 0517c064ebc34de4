"""Experts of Hugging Face files that keep the matrices of a layer in one tensor, as weights [experts, N, K]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..backend.v1 import Array
from ..errors import ModelError
from ..formats import FORMATS
from .weights import MappedWeight

SCALED = 32
"""Numbers that share a scale in MXFP4."""


@dataclass(frozen=True)
class TurnedExperts:
    """Of a tensor [experts, K, M] every ``step``-th column from ``first`` on, as the rows of each expert."""

    name: str
    source: MappedWeight
    first: int
    step: int

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def shape(self) -> tuple[int, ...]:
        experts, depth, columns = self.source.shape
        return (experts, len(range(self.first, columns, self.step)), depth)

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy of the rows asked for, made anew each time."""
        width = FORMATS[self.format].block_bytes
        stored = self.source.rows().reshape(*self.source.shape, width)
        found = [
            np.ascontiguousarray(stored[e, :, self.first :: self.step][:, rows].swapaxes(0, 1))
            for e, rows in _parts(self.shape, start, stop)
        ]
        return np.concatenate(found).reshape(-1, self.shape[2] * width)

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense()[:, :, self.first :: self.step].swapaxes(1, 2))

    def release(self) -> None:
        self.source.release()


@dataclass(frozen=True)
class MXFP4Experts:
    """Of blocks [experts, M, K / 32, 16] and scales [experts, M, K / 32], both u8, every ``step``-th row M from ``first``
    on. Byte j of a block holds the numbers 2j and 2j + 1 (OCP Microscaling Formats 1.0); ggml's block, which ``rows``
    gives, is the scale before 16 bytes of the numbers j and j + 16."""

    name: str
    blocks: MappedWeight
    scales: MappedWeight
    first: int
    step: int
    format: str = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, columns, groups = self.scales.shape
        return (experts, len(range(self.first, columns, self.step)), groups * SCALED)

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        """A copy of the rows asked for, made anew each time."""
        blocks, scales = (w.rows().reshape(w.shape) for w in (self.blocks, self.scales))
        found = []
        for e, rows in _parts(self.shape, start, stop):
            packed = blocks[e, self.first :: self.step][rows]
            numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], SCALED)
            half = SCALED // 2
            scale = scales[e, self.first :: self.step][rows][..., None]
            found.append(np.concatenate([scale, numbers[..., :half] | numbers[..., half:] << 4], axis=-1))
        return np.concatenate(found).reshape(-1, FORMATS[self.format].row_bytes(self.shape[2]))

    def dense(self) -> Array:
        return FORMATS[self.format].decode(self.rows()).reshape(self.shape)

    def release(self) -> None:
        self.blocks.release()
        self.scales.release()


def _parts(shape: tuple[int, ...], start: int, stop: int | None) -> list[tuple[int, slice]]:
    """The experts, and the rows of each, that rows ``start`` to ``stop`` of the flattened leading axes fall on."""
    experts, columns, _ = shape
    stop = experts * columns if stop is None else min(stop, experts * columns)
    return [
        (e, slice(max(start - e * columns, 0), min(stop - e * columns, columns)))
        for e in range(start // columns, -(-stop // columns))
    ]


def turned_experts(name: str, source: MappedWeight, first: int = 0, step: int = 1) -> TurnedExperts:
    """ModelError for what is no such tensor, or is stored in blocks, which cannot be turned."""
    if len(source.shape) != 3 or source.format not in ("F32", "F16", "BF16"):
        raise ModelError(
            f"{source.name} is stored as {source.format} {list(source.shape)}; experts that lie transposed in their file must"
            " be F32, F16 or BF16 [experts, inputs, outputs]."
        )
    return TurnedExperts(name, source, first, step)


def mxfp4_experts(name: str, blocks: MappedWeight, scales: MappedWeight, first: int = 0, step: int = 1) -> MXFP4Experts:
    """ModelError unless the blocks and their scales are bytes that belong together."""
    fit = len(scales.shape) == 3 and blocks.shape == (*scales.shape, SCALED // 2)
    if not fit or {blocks.format, scales.format} != {"U8"}:
        raise ModelError(
            f"{blocks.name} {blocks.format} {list(blocks.shape)} and {scales.name} {scales.format} {list(scales.shape)} are no"
            " MXFP4 experts; these are U8 [experts, outputs, inputs / 32, 16] and U8 [experts, outputs, inputs / 32]."
        )
    return MXFP4Experts(name, blocks, scales, first, step)
