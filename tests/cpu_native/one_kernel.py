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
    outputs: Sequence[tuple[tuple[int, ...], type] | None],
    *,
    weights: Sequence[Any] = (),
    states: Sequence[np.ndarray] = (),
    numbers: Mapping[str, float] | None = None,
    isa: str = ISAS[0],
    threads: int = 2,
    max_context: int = 4096,
) -> list[np.ndarray]:
    """The outputs (shape, dtype) of one run. They hold 0xff bytes (NaN, -1) before it; None are absent, as inputs and
    as outputs.

    Weights are packed ones, or arrays that go in as plain f32. Variants are compared, which must agree in every bit but in
    products with bf16 weights."""
    counts = [dims.get(name, 0) for name in native.DIMS]
    packed = [native.plain(np.ascontiguousarray(w, np.float32)) if isinstance(w, np.ndarray) else w for w in weights]

    def run(variant: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        results = [None if output is None else poisoned(*output) for output in outputs]
        runner = emulator.run if variant in emulator.ISAS else _run_native
        runner(variant, kernel, counts, inputs, results, packed, arrays, dict(numbers or {}), threads, max_context)
        return [array for array in results if array is not None]

    best = NATIVE_ISAS[0]
    if ROUNDS_TWICE in (isa, best) or isa == best:
        return run(isa, states)
    copies = [state.copy() for state in states]
    results, wanted = run(isa, states), run(best, copies)
    for i, (got, want) in enumerate(zip((*results, *states), (*wanted, *copies), strict=True)):
        error = f"{kernel}: {isa} and {best} differ"
        product = kernel.endswith("linear") and i < len(packed)
        if product and packed[i].family == "bf16":  # whose sums round in each machine's own way
            largest = np.abs(want).max(initial=0, where=np.isfinite(want))
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * largest, equal_nan=True, err_msg=error)
        else:
            assert _equal(got, want), error
    return results


def _equal(got: np.ndarray, want: np.ndarray) -> bool:
    """NaN are of one bit pattern nearly always, and bytes are compared much faster than they are looked for."""
    one, other = (a.reshape(-1).view(np.uint8) for a in (got, want))
    return np.array_equal(one, other) or np.array_equal(got, want, equal_nan=got.dtype.kind == "f")


def _run_native(
    isa: str,
    kernel: str,
    counts: Sequence[int],
    inputs: Sequence[np.ndarray | None],
    results: Sequence[np.ndarray | None],
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
    wanted = [(len(inputs) + i, array) for i, array in enumerate(results) if array is not None]
    for i, array in wanted:
        segment.value(i, array.nbytes, "1")
    made = [-1 if array is None else len(inputs) + i for i, array in enumerate(results)]
    given = [i if array is not None else -1 for i, array in enumerate(inputs)]
    segment.add(kernel, given, made, list(weights), list(states), numbers)
    segment.finish([i for i, _ in bound], [i for i, _ in wanted])
    segment.run(counts, [np.ascontiguousarray(array) for _, array in bound], [array for _, array in wanted])


def poisoned(shape: tuple[int, ...], dtype: type, byte: int = 0xFF) -> np.ndarray:
    """An array of the same bytes, by default 0xff: NaN as floats, -1 as integers."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = byte
    return array
