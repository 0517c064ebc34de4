"""Numbers of E4M3, as the OCP 8-bit Floating Point Specification 1.0 has them in section 5.2: four bits of exponent, three of
what follows the one, no infinities, NaN where all bits but the sign are set."""

from __future__ import annotations

import numpy as np

from .backend.v1 import Array


def _table() -> Array:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    magnitude[code & 127 == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


E4M3_TABLE = _table()


def to_e4m3(values: Array) -> Array:
    """The bytes of f32 values: the nearest number, ties to even; saturated at 448, NaN where a value is not finite."""
    size = np.abs(values)
    exponent = np.maximum((size.view(np.uint32) >> 23).astype(np.int32) - 127, -6)
    with np.errstate(invalid="ignore", over="ignore"):
        # The first number of an exponent e is 8 steps of 2^(e - 3), and has the code 8 (e + 7).
        steps = np.rint(np.ldexp(size, 3 - exponent))
        codes = np.minimum((exponent + 7) * 8 + steps - 8, 0x7E) + np.where(np.signbit(values), 0x80, 0)
        finite: Array = np.isfinite(values)
        return np.where(finite, codes, 0x7F).astype(np.uint8)
