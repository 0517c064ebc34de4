"""Rows of weights as the bytes of a format, in pieces that fit a core's cache, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from types import MappingProxyType

import numpy as np

from engine.formats import FORMATS
from engine.formats.quantformats import Bytes, Floats
from engine.quantize import blocks, superblocks

Encoder = Callable[[Floats, Floats | None], Bytes]

_PIECE = 1 << 16
"""Weights that are encoded at a time: the buffers of a search on them stay in the second-level cache."""

_PLAIN_SHARE = np.float32(0.2)
"""With it the search is ahead of llama-quantize in the weighted and in the plain error (benchmarks/quantize_peers.py)."""

# format -> weights of a part, and the encoder of its blocks
_ENCODERS: Mapping[str, tuple[int, Encoder]] = MappingProxyType(
    {
        "Q4_0": (32, blocks.q4_0),
        "Q4_1": (32, blocks.q4_1),
        "Q5_0": (32, blocks.q5_0),
        "Q5_1": (32, blocks.q5_1),
        "Q8_0": (32, blocks.q8_0),
        "IQ4_NL": (32, blocks.iq4_nl),
        "MXFP4": (32, blocks.mxfp4),
        "Q2_K": (16, superblocks.q2_k),
        "Q3_K": (16, superblocks.q3_k),
        "Q4_K": (32, superblocks.q4_k),
        "Q5_K": (32, superblocks.q5_k),
        "Q6_K": (16, superblocks.q6_k),
        "IQ4_XS": (32, superblocks.iq4_xs),
    }
)


def encodable(name: str) -> bool:
    """Whether rows can be encoded in this format."""
    return name in _ENCODERS or name in ("F32", "F16", "BF16")


def encode_rows(name: str, rows: Floats, importance: Floats | None, threads: Executor) -> Bytes:
    """f32 [rows, cols] as uint8 [rows, row bytes].

    ``importance``: f32 [cols], not negative, how much an error in each column costs; None for all alike. Weights must be
    finite; FormatError for a block whose scale f16 cannot hold.
    """
    form = FORMATS[name]
    if name not in _ENCODERS:
        assert form.encode is not None
        return form.encode(rows)
    out = np.empty((len(rows), form.row_bytes(rows.shape[1])), np.uint8)
    a_row = rows.shape[1] // form.block
    flat, out_blocks = rows.reshape(-1, form.block), out.reshape(-1, form.block_bytes)
    costs = None if importance is None else _costs(importance).reshape(a_row, form.block)
    spans = list(_spans(len(flat), a_row, form.block))
    for span, packed in zip(spans, threads.map(lambda s: _piece(name, flat, costs, s), spans), strict=True):
        out_blocks[span] = packed
    return out


def _costs(importance: Floats) -> Floats:
    """The importance with a mean of 1, and a share of all alike: what one text shows is an estimate, and columns that it never
    uses are still to be fitted."""
    mean = importance.mean(dtype=np.float64)
    if not mean > 0:
        return np.ones_like(importance)
    costs: Floats = importance / np.float32(mean) + _PLAIN_SHARE
    return costs


def _spans(count: int, a_row: int, block: int) -> Iterator[slice]:
    """Pieces of whole rows, or of parts of a row where one is longer than a piece."""
    fit = max(_PIECE // block, 1)
    step = fit // a_row * a_row if a_row <= fit else fit
    starts = [s for row in range(0, count, a_row) for s in range(row, row + a_row, fit)] if a_row > fit else None
    for start in starts or range(0, count, step):
        yield slice(start, min(start + step, count if starts is None else (start // a_row + 1) * a_row))


def _piece(name: str, flat: Floats, costs: Floats | None, span: slice) -> Bytes:
    part, encoder = _ENCODERS[name]
    values = flat[span]
    weight = None
    if costs is not None:
        first = span.start % len(costs)
        weight = _columns(np.resize(costs[first:], values.shape) if first else np.resize(costs, values.shape), part)
    return encoder(_columns(values, part), weight)


def _columns(values: Floats, part: int) -> Floats:
    """Blocks [blocks, block] as columns: [part, blocks], or [part, parts, blocks] of a superblock."""
    if values.shape[1] == part:
        return np.ascontiguousarray(values.T)
    parts: Floats = np.ascontiguousarray(values.reshape(len(values), -1, part).transpose(2, 1, 0))
    return parts
