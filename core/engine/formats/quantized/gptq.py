"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it, 4 and 8 bits.

A module [N, K] has qweight i32 [K / per, N] with `per` = 32 / bits codes a word, the first k lowest; scales [groups, N];
qzeros i32 [groups, N / per], packed along N; and g_idx i32 [K], the group of each input, where absent k // group_size.
With act-order (desc_act) g_idx is no run: the matrix is sorted by group here, and its input with it. Zero points are
stored one less, modulo 2^bits, in the format "gptq" and as they are in "gptq_v2".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import Tensor
from engine.formats.quantized.grouped import Groups, compose_groups
from engine.formats.quantized.parts import Parts
from engine.formats.quantized.settings import Settings, parse
from engine.formats.quantized.stored import FLOATS, Ints, floats, unpack, words


class _Settings(Settings):
    bits: Literal[4, 8]
    group_size: int = 128
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    known = parse(_Settings, {"checkpoint_format": settings.get("format", "gptq"), **settings})
    for stem in parts.stems(".qweight"):
        _compose(known, parts, stem)


def _compose(settings: _Settings, parts: Parts, stem: str) -> None:
    bits, per = settings.bits, 32 // settings.bits
    qweight = parts.take(f"{stem}.qweight", ("I32",), (None, None))
    depth, rows = qweight.shape[0] * per, qweight.shape[1]
    if settings.group_size != -1 and settings.group_size < 1:
        raise FormatError(f"group_size is {settings.group_size}; it must be positive, or -1 for one group a row.")
    size = depth if settings.group_size == -1 else settings.group_size
    count = -(-depth // size)
    scales = parts.take(f"{stem}.scales", FLOATS, (count, rows))
    qzeros = parts.take(f"{stem}.qzeros", ("I32",), (count, -(-rows // per)))
    g_idx = parts.maybe(f"{stem}.g_idx", ("I32",), (depth,))
    one_less = settings.checkpoint_format == "gptq"

    def zeros(start: int, stop: int) -> Ints:
        first = start // per
        stored = unpack(words(qzeros)[:, first : -(-stop // per)], bits)[:, start - first * per : stop - first * per]
        return (stored + np.uint8(one_less) & (1 << bits) - 1).T

    groups = Groups(
        f"{stem}.weight",
        (rows, depth),
        bits,
        size,
        codes=lambda start, stop: unpack(words(qweight)[:, start:stop].T, bits),
        scales=lambda start, stop: floats(scales, slice(None), slice(start, stop)).T,
        zeros=zeros,
        order=None if g_idx is None else group_order(f"{stem}.g_idx", g_idx, count),
    )
    parts.put(compose_groups(groups, tuple(part for part in (qweight, scales, qzeros, g_idx) if part is not None)))


def group_order(name: str, g_idx: Tensor, count: int) -> Ints:
    """i32 [K]; FormatError for a group that there is not."""
    order = g_idx.data.view("<i4")
    if order.size and not (order.min() >= 0 and order.max() < count):
        raise FormatError(f"{name} names groups from {order.min()} to {order.max()}, but there are {count}.")
    return order
