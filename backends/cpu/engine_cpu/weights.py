"""Packing a weight for the native kernels: vectors as f32, matrices into panels of 16 columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.backend.v1 import Array, Call, Packed, WeightRef, codebook

from . import _native

DENSE = frozenset({"F32", "F16", "BF16", "FP8", "NF4", "FP4"})
"""Formats whose kernels read f32 activations, or bf16 ones; those of the others read activations of 8 bits."""
QUANTIZED = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"}
    | {"IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0"}
    | {"NVFP4S", "W4Z", "W8S", "W8M"}
)
SUPERBLOCKS = frozenset(
    {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0"}
    | {"IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS"}
)
"""Quantized formats of 256 weights a block, whose kernels read activations with one scale for 128 values."""
FORMATS = DENSE | QUANTIZED
SPANS = {"q8g32": 32, "q8g128": 128}
"""Layouts of packed activations: how many values have one scale."""
RANGE = 4096
"""Columns read at a time, whole strips: as many bytes as a weight that is no view of its file takes twice."""


def is_quantized(name: str) -> bool:
    return name in QUANTIZED


def activation(format_: str) -> str:
    """What the kernels of a format read as x: the dtype f32, or a layout of quantize."""
    if is_quantized(format_):
        return "q8g128" if format_ in SUPERBLOCKS else "q8g32"
    return "bf16" if format_ == "BF16" else "f32"


def activations(call: Call) -> set[str]:
    """What the kernels of a call read as x. Rows of q8g128 serve the formats of q8g32, too."""
    read = {activation(ref.format) for name, ref in call.weights.items() if name.startswith("weight")}
    return read - {"q8g32"} if "q8g128" in read else read


def pack_plain(ref: WeightRef, progress: Callable[[int], None]) -> Packed:
    """A vector, or one an expert, as f32."""
    dense = np.ascontiguousarray(ref.dense(), np.float32)
    progress(dense.nbytes)
    return Packed(_native.plain(dense), dense.nbytes, lambda: dense)


def pack(ref: WeightRef, queue: _native.PackQueue, progress: Callable[[int], None]) -> Packed:
    """A matrix [N, K] or [experts, N, K] becomes the panels of its format's family, packed by the threads of ``queue`` after
    the return."""
    *lead, columns, depth = ref.shape
    count = lead[0] if lead else 1
    weight = _native.alloc(ref.format, columns, depth, count, codebook(ref.format).tolist())
    read = last = 0
    for index in range(count):
        for first in range(0, columns, RANGE):
            rows = ref.rows(index * columns + first, index * columns + min(first + RANGE, columns))
            last = queue.add(weight, rows, first, index)
            read += rows.nbytes

    def ready() -> None:
        queue.wait(last)
        progress(read)

    def unpack() -> Array:
        queue.wait(last)
        return _unpack(weight, ref.shape)

    return Packed(weight, weight.nbytes, unpack, ready)


def _unpack(weight: Any, shape: tuple[int, ...]) -> Array:
    matrices = [_native.unpack(weight, 0, weight.columns, index) for index in range(weight.count)]
    return np.stack(matrices).reshape(shape)
