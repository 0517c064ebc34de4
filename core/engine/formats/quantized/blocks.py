"""Codes and scales as the bytes of blocks, each of which has its scale before 32 codes or so."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.formats.quantformats import Bytes, Floats

BLOCK = 32


def octets(values: npt.NDArray[Any], dtype: str) -> Bytes:
    """Numbers [..] as their bytes [.., size]."""
    return np.ascontiguousarray(values, dtype)[..., None].view(np.uint8)


def row(*pieces: Bytes) -> Bytes:
    """The pieces [n, blocks, bytes] of each block, one behind the other: [n, row bytes]."""
    return np.concatenate(pieces, axis=-1).reshape(len(pieces[0]), -1)


def in_turn(packed: Bytes) -> Bytes:
    """Bytes [n, ..] with two codes of four bits each, the low ones first: codes [n, count]."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(len(packed), -1)


def by_halves(codes: Bytes) -> Bytes:
    """Codes of four bits [.., 2 h] as bytes [.., h], of which j has j, low, and j + h."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | codes[..., half:] << np.uint8(4)


def are_halves(values: Floats) -> bool:
    """Whether all are numbers of f16."""
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())
