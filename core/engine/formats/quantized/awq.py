"""AWQ (arXiv 2306.00978) as AutoAWQ's GEMM layout stores it: 4 bits, with zero points.

A module [N, K] has qweight i32 [K, N / 8], qzeros i32 [groups, N / 8] and scales [groups, N]. A word holds eight columns,
whose nibbles from the lowest on are those of columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import Tensor
from engine.formats.quantformats import Bytes
from engine.formats.quantized.grouped import Groups, compose_groups
from engine.formats.quantized.parts import Parts
from engine.formats.quantized.settings import Settings, parse
from engine.formats.quantized.stored import FLOATS, floats, unpack, words

_PER = 8
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in its word each column's nibble is."""


class _Settings(Settings):
    bits: Literal[4] = 4
    group_size: int = 128
    zero_point: Literal[True] = True
    version: Literal["gemm"] = "gemm"


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    version = settings.get("version", settings.get("format", "gemm"))
    known = parse(_Settings, {**settings, "version": version.lower() if isinstance(version, str) else version})
    for stem in parts.stems(".qweight"):
        _compose(known, parts, stem)


def _compose(settings: _Settings, parts: Parts, stem: str) -> None:
    qweight = parts.take(f"{stem}.qweight", ("I32",), (None, None))
    depth, rows = qweight.shape[0], qweight.shape[1] * _PER
    if settings.group_size != -1 and settings.group_size < 1:
        raise FormatError(f"group_size is {settings.group_size}; it must be positive, or -1 for one group a row.")
    size = depth if settings.group_size == -1 else settings.group_size
    count = -(-depth // size)
    scales = parts.take(f"{stem}.scales", FLOATS, (count, rows))
    qzeros = parts.take(f"{stem}.qzeros", ("I32",), (count, rows // _PER))
    groups = Groups(
        f"{stem}.weight",
        (rows, depth),
        4,
        size,
        codes=lambda start, stop: _columns(qweight, start, stop),
        scales=lambda start, stop: floats(scales, slice(None), slice(start, stop)).T,
        zeros=lambda start, stop: _columns(qzeros, start, stop),
    )
    parts.put(compose_groups(groups, (qweight, scales, qzeros)))


def _columns(tensor: Tensor, start: int, stop: int) -> Bytes:
    """Columns start to stop of a packed tensor [rows, N / 8], as uint8 [stop - start, rows]."""
    first, last = start // _PER, -(-stop // _PER)
    nibbles = unpack(words(tensor)[:, first:last], 4).reshape(tensor.shape[0], -1, _PER)[..., _PLACES]
    return nibbles.reshape(tensor.shape[0], -1)[:, start - first * _PER : stop - first * _PER].T
