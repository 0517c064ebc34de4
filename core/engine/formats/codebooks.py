"""The codebooks of GGUF's IQ1, IQ2 and IQ3: what the indices in their blocks stand for, as the ``gguf`` package has them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

_FORMATS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


@cache
def codebook(format_: str) -> npt.NDArray[np.uint32]:
    """An entry for each index, uint32 [indices]: of its eight numbers (IQ1, IQ2) or four (IQ3) the places among all numbers of
    the format in ascending order, a nibble each, the first one lowest. Signs are not in it. Empty for other formats."""
    if format_ not in _FORMATS:
        return np.empty(0, np.uint32)
    from gguf import quants

    found: Any = getattr(quants, format_)
    found.init_grid()
    entries = found.grid.reshape(found.grid_shape)
    places = np.searchsorted(np.array(found.grid_map, entries.dtype), entries).astype(np.uint32)
    shifts = 4 * np.arange(entries.shape[1], dtype=np.uint32)
    packed: npt.NDArray[np.uint32] = np.bitwise_or.reduce(places << shifts, axis=1)
    return packed
