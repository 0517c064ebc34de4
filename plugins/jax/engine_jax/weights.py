"""Weights on the device: plain numbers, or the codes of a quantized matrix with a scale a group, exactly as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from engine.backend.v1 import Array, Packed, WeightRef

from .blocks import DECODERS

PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
ROWS = 4096
"""Rows read at a time."""


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Weight:
    """Numbers [..., N, K] = (codes - zero) * scale - low, with a scale and a low for each group of codes along K; those of
    plain numbers are their codes, without a scale. Codes of four bits lie two a byte: of each group the first half in the
    low bits, the other half in the high bits."""

    codes: jax.Array
    scale: jax.Array | None = None
    low: jax.Array | None = None
    zero: int = field(default=0, metadata={"static": True})
    packed: bool = field(default=False, metadata={"static": True})

    def dense(self) -> jax.Array:
        """The numbers, f32 where they are quantized, else as they are stored."""
        if self.scale is None:
            return self.codes
        lead, groups = self.codes.shape[:-1], self.scale.shape[-1]
        codes = self.codes.reshape(*lead, groups, -1)
        if self.packed:
            codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
        numbers = (codes.astype(jnp.int32) - self.zero).astype(jnp.float32)
        numbers = numbers * self.scale[..., None].astype(jnp.float32)
        if self.low is not None:
            numbers = numbers - self.low[..., None]
        return numbers.reshape(*lead, -1)

    def take(self, rows: Any) -> Weight:
        """The entries ``rows`` of the first axis, as a weight."""
        return jax.tree.map(lambda array: array[rows], self)

    def as_dtype(self, dtype: DTypeLike) -> jax.Array:
        return self.dense().astype(dtype)


@dataclass
class Held:
    """A packed weight's place: several devices may share it out later."""

    weight: Weight
    shared: bool = False


def pack(ref: WeightRef, put: Callable[[Array], jax.Array], progress: Callable[[int], None]) -> Packed:
    """The weight on the device. Formats of blocks keep their bits; those that this backend cannot unpack become f32."""
    matrix = len(ref.shape) > 1
    if matrix and ref.format in PLAIN:
        numbers = [np.ascontiguousarray(rows).view(PLAIN[ref.format]) for rows in _read(ref)]
        weight = Weight(put(np.concatenate(numbers).reshape(ref.shape)))
    elif matrix and ref.format in DECODERS:
        weight = _quantized(ref, put)
    else:
        weight = Weight(put(np.array(ref.dense(), np.float32)))
    progress(ref.rows().nbytes)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    held = Held(weight)
    return Packed(held, nbytes, lambda: np.asarray(held.weight.as_dtype(jnp.float32)))


def _read(ref: WeightRef) -> Iterator[Array]:
    """The stored rows of all leading axes, some at a time."""
    total = prod(ref.shape[:-1])
    return (ref.rows(first, min(first + ROWS, total)) for first in range(0, total, ROWS))


def _quantized(ref: WeightRef, put: Callable[[Array], jax.Array]) -> Weight:
    *lead, width = ref.shape
    parts = [DECODERS[ref.format](rows) for rows in _read(ref)]

    def whole(arrays: Sequence[Array | None]) -> jax.Array | None:
        found = [array for array in arrays if array is not None]
        return put(np.concatenate(found).reshape(*lead, -1)) if found else None

    codes = whole([part.codes for part in parts])
    assert codes is not None
    scale, low = whole([part.scale for part in parts]), whole([part.low for part in parts])
    return Weight(codes, scale, low, parts[0].zero, packed=codes.shape[-1] < width)
