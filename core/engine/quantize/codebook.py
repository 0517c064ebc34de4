"""Formats whose 4-bit levels are indices of a table of unevenly spaced numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.formats.quantformats import Bytes, Floats
from engine.quantize.search import SMALLEST, Fit


@dataclass(frozen=True)
class Codebook:
    """``numbers``: whole, by index; ``trials``: the numbers that a block's largest weight is tried on in a search."""

    numbers: tuple[int, ...]
    trials: tuple[float, ...]

    @cached_property
    def _nearest(self) -> tuple[Bytes, Floats]:
        """Index and number nearest to h/2 .. h/2 + 1/2, for each half h from -256 on; borders between whole numbers are halves,
        so that no half holds two."""
        middles = np.arange(-256, 256, dtype=np.float64)[:, None] / 2 + 0.25
        index = np.abs(middles - np.array(self.numbers)).argmin(axis=1)
        return index.astype(np.uint8), np.array(self.numbers, np.float32)[index]

    def _halves(self, x: Floats, inverse: Floats) -> npt.NDArray[np.intp]:
        scaled = np.clip(x * (2 * inverse), -256, 255)
        found: npt.NDArray[np.intp] = np.floor(scaled, out=scaled).astype(np.intp) + 256
        return found

    def indices(self, x: Floats, scale: Floats) -> Bytes:
        """uint8 [elements, blocks]: the index nearest to x / scale."""
        return self._nearest[0].take(self._halves(x, _inverse(scale)))

    def error(self, x: Floats, weight: Floats | None, scale: Floats) -> Floats:
        """f32 [blocks]: the weighted sum of squared errors with these scales."""
        difference = self._nearest[1].take(self._halves(x, _inverse(scale))) * scale - x
        difference *= difference
        total: Floats = (difference if weight is None else difference * weight).sum(axis=0)
        return total

    def fit(self, x: Floats, weight: Floats | None) -> Fit:
        """The scale [blocks] of least weighted squared error, by the search of ``search.fit_scale``."""
        top, bottom = x.max(axis=0), x.min(axis=0)
        extreme = np.where(top > -bottom, top, bottom)
        extreme = np.where(np.abs(extreme) > SMALLEST, extreme, 1)
        weighted = x if weight is None else x * weight
        best = np.zeros((3, x.shape[1]), np.float32)
        for trial in self.trials:
            number = self._nearest[1].take(
                self._halves(x, (np.float32(trial) / extreme).astype(np.float32, copy=False))
            )
            cross = (number * weighted).sum(axis=0)
            number *= number
            squares = (number if weight is None else number * weight).sum(axis=0)
            scale = np.divide(cross, squares, out=np.zeros_like(cross), where=squares > 0)
            found = np.stack([cross * scale, scale, squares])
            np.copyto(best, found, where=found[0] > best[0])
        return Fit(best[1], np.zeros_like(best[1]), best[2])


def _inverse(scale: Floats) -> Floats:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


IQ4 = Codebook(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    (*range(-141, -112, 4), *range(101, 126, 4)),
)
MX = Codebook((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), ())
"""E2M1, doubled: the second 0 is the negative one, which is never chosen."""
