"""What a GPU's figures should be."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

BARS = (
    ("attention", "*, 16 x *", "of_copy", 0.85),
    ("attention", "*, 64 x *", "of_copy", 0.85),
    ("matmul", "w8a8", "of_dense", 0.60),
    ("matmul", "w8a8", "of_torch", 1.0),
    ("matmul", "fp8", "of_dense", 0.60),
    ("matmul", "fp8", "of_torch", 1.0),
    ("weights", "* rows", "of_copy", 0.75),
    ("model", "decode, 1 x *", "of_floor", 0.80),
    ("model", "decode, 64 x *", "of_floor", 0.75),
    ("model", "decode, 256 x *", "of_floor", 0.75),
    ("model", "prompt of *", "of_dense", 0.50),
)
"""A section, the pattern of a figure's name, the figure, and the least that it should be. Products of bytes are those of an x
that is quantized already, as torch's own take it."""


def judged(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether the bars are met by what was measured."""
    return [
        {"bar": f"{section}: {name}", "least": least, "value": figures[key], "met": figures[key] >= least}
        for section, pattern, key, least in BARS
        for name, figures in found.get(section, {}).items()
        if fnmatchcase(name, pattern) and isinstance(figures, dict) and key in figures
    ]
