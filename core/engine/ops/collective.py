"""What the ranks of a group do with a value: all_reduce and all_gather. A group of one rank gives the value back, as the
references do; with several, the device's collectives or those of the host run them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..backend.v1 import Array, Dims
from .spec import Case, Generator, OpSpec


def all_reduce(*, x: Array) -> tuple[Array]:
    """The sum of all ranks' x [rows, N]: f32 [rows, N]."""
    return (np.array(x, np.float32),)


def all_gather(*, x: Array) -> tuple[Array]:
    """The columns of all ranks' x [rows, N], in the order of ranks: f32 [rows, ranks * N]."""
    return (np.array(x, np.float32),)


def _cases(rng: Generator) -> Iterator[Case]:
    for rows, width in ((1, 64), (7, 33), (40, 128), (3, 1)):
        yield Case(f"{rows}x{width}", Dims(T=rows), {"x": rng.standard_normal((rows, width), np.float32)})


SPECS = (
    OpSpec("all_reduce", inputs=("x",), outputs=("y",), reference=all_reduce, cases=_cases),
    OpSpec("all_gather", inputs=("x",), outputs=("y",), reference=all_gather, cases=_cases),
)
