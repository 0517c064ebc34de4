"""Runs one kernel of the native library on given arrays, outside any model."""

from collections.abc import Mapping, Sequence
from typing import Any

import emulator
import numpy as np
import pytest

native = pytest.importorskip("engine_cpu._native", reason="the native library is not built")

NATIVE_ISAS: list[str] = native.isa_list()
ISAS = NATIVE_ISAS + emulator.ISAS
POOLS = {threads: native.Pool(threads) for threads in (1, 2, 3)}


def run_kernel(
    kernel: str,
    dims: Mapping[str, int],
    inputs: Sequence[np.ndarray | None],
    outputs: Sequence[tuple[tuple[int, ...], type]],
    *,
    weights: Sequence[Any] = (),
    states: Sequence[np.ndarray] = (),
    numbers: Mapping[str, float] | None = None,
    isa: str = ISAS[0],
    threads: int = 2,
    max_context: int = 4096,
) -> list[np.ndarray]:
    """The outputs (shape, dtype) of one run. They hold 0xff bytes (NaN, -1) before it; None inputs are absent.

    Weights are packed ones, or arrays that go in as plain f32."""
    counts = [dims.get(name, 0) for name in native.DIMS]
    packed = [native.plain(np.ascontiguousarray(w, np.float32)) if isinstance(w, np.ndarray) else w for w in weights]
    results = [poisoned(shape, dtype) for shape, dtype in outputs]
    if isa in emulator.ISAS:
        emulator.run(
            isa, kernel, counts, inputs, results, packed, states, dict(numbers or {}), threads, max_context
        )  # fmt: skip
        return results
    segment = native.Segment(POOLS[threads], counts, max_context, isa=isa, poison=True)
    bound = [(i, array) for i, array in enumerate(inputs) if array is not None]
    for i, array in bound:
        segment.value(i, array.nbytes, "1")
    ids = [len(inputs) + i for i in range(len(outputs))]
    for i, array in zip(ids, results, strict=True):
        segment.value(i, array.nbytes, "1")
    segment.add(
        kernel,
        [i if array is not None else -1 for i, array in enumerate(inputs)],
        ids,
        packed,
        list(states),
        dict(numbers or {}),
    )
    segment.finish([i for i, _ in bound], ids)
    segment.run(counts, [np.ascontiguousarray(array) for _, array in bound], results)
    return results


def poisoned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An array of 0xff bytes: NaN as floats, -1 as integers."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF
    return array
