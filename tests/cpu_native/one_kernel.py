"""Runs one kernel of the native library on given arrays, outside any model."""

from collections.abc import Mapping, Sequence
from typing import Any

import emulator
import numpy as np
import pytest

native = pytest.importorskip("engine_cpu._native", reason="the native library is not built")

NATIVE_ISAS: list[str] = native.isa_list()
ISAS = [*NATIVE_ISAS, *emulator.ISAS[-1:]]
DOT_ISAS = NATIVE_ISAS + emulator.ISAS  # for kernels with integer products, in which the emulated variants differ
ROUNDS_TWICE = "portable"  # the variant whose fma may not be fused; all others agree in every bit
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

    Weights are packed ones, or arrays that go in as plain f32. Variants that must agree in every bit are compared."""
    counts = [dims.get(name, 0) for name in native.DIMS]
    packed = [native.plain(np.ascontiguousarray(w, np.float32)) if isinstance(w, np.ndarray) else w for w in weights]

    def run(variant: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        results = [poisoned(shape, dtype) for shape, dtype in outputs]
        runner = emulator.run if variant in emulator.ISAS else _run_native
        runner(variant, kernel, counts, inputs, results, packed, arrays, dict(numbers or {}), threads, max_context)
        return results

    best = NATIVE_ISAS[0]
    if ROUNDS_TWICE in (isa, best) or isa == best:
        return run(isa, states)
    copies = [state.copy() for state in states]
    results, wanted = run(isa, states), run(best, copies)
    for got, want in zip((*results, *states), (*wanted, *copies), strict=True):
        assert np.array_equal(got, want, equal_nan=got.dtype.kind == "f"), f"{kernel}: {isa} and {best} differ"
    return results


def _run_native(
    isa: str,
    kernel: str,
    counts: Sequence[int],
    inputs: Sequence[np.ndarray | None],
    results: Sequence[np.ndarray],
    weights: Sequence[Any],
    states: Sequence[np.ndarray],
    numbers: dict[str, float],
    threads: int,
    max_context: int,
) -> None:
    segment = native.Segment(POOLS[threads], counts, max_context, isa=isa, poison=True)
    bound = [(i, array) for i, array in enumerate(inputs) if array is not None]
    for i, array in bound:
        segment.value(i, array.nbytes, "1")
    ids = [len(inputs) + i for i in range(len(results))]
    for i, array in zip(ids, results, strict=True):
        segment.value(i, array.nbytes, "1")
    given = [i if array is not None else -1 for i, array in enumerate(inputs)]
    segment.add(kernel, given, ids, list(weights), list(states), numbers)
    segment.finish([i for i, _ in bound], ids)
    segment.run(counts, [np.ascontiguousarray(array) for _, array in bound], list(results))


def poisoned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An array of 0xff bytes: NaN as floats, -1 as integers."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF
    return array
