"""The CPU's linear kernels against the machine's limits, measured beside them in the same run.

usage: kernels_cpu.py [--threads 2] [--isa NAME] [--formats Q4_0,Q4_K,...] [--rows 1,2,...] [--bytes 600e6] [--rounds 5]
       [--columns 3072] [--depth 1024]
One JSON object: for each format and number of rows, the weights' GB/s and the products' GOP/s (two a multiply-add), and what
part of the read bandwidth and of the peak that is (int8; of dense formats f32, of BF16 that of its instruction set): medians
over the rounds, each of which measures the limit, then the kernel. The weights are a sequence of matrices that exceeds the
caches, as a model's are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from machine_limits import MachineLimits

from engine.backend.v1 import codebook
from engine.formats import FORMATS
from engine.ops.dense import quantize_q8
from engine.ops.dtypes import from_f32
from engine_cpu import _native
from engine_cpu.weights import QUANTIZED, activation

DENSE = ("F32", "F16", "BF16")
GGUF = {name for name in QUANTIZED if FORMATS[name].ggml_type is not None}


def matrices(name: str, columns: int, depth: int, nbytes: float) -> list[Any]:
    """Packed matrices, as many as make ``nbytes``. Random bytes between 32 and 63: no number is subnormal or infinite."""
    row = FORMATS[name].row_bytes(depth)
    raw = np.random.default_rng(0).integers(32, 64, (columns, row), np.uint8)
    packed = []
    for _ in range(max(1, int(nbytes / (columns * row)))):
        packed.append(_native.alloc(name, columns, depth, 1, codebook(name).tolist()))
        _native.pack_into(packed[-1], raw)
    return packed


class Chain:
    """One segment that multiplies the same rows with every matrix."""

    def __init__(self, pool: Any, isa: str, name: str, weights: list[Any], rows: int) -> None:
        depth, columns = weights[0].depth, weights[0].columns
        self._dims = [rows] + [0] * (len(_native.DIMS) - 1)
        self._segment = _native.Segment(pool, self._dims, 1, isa=isa)
        dense = name in DENSE
        x = np.random.default_rng(1).standard_normal((rows, depth), np.float32)
        self._x = from_f32(x, "bf16") if name == "BF16" else x if dense else quantize_q8(x, activation(name))
        self._segment.value(0, self._x.nbytes, "1")
        for i, weight in enumerate(weights, start=1):
            self._segment.value(i, rows * columns * 4, "1")
            self._segment.add("linear", [-1, 0, -1] if dense else [0, -1, -1], [i], [weight])
        self._y = np.empty((rows, columns), np.float32)
        self._segment.finish([0], [len(weights)])

    def seconds(self) -> float:
        start = time.perf_counter()
        self._segment.run(self._dims, [self._x], [self._y])
        return time.perf_counter() - start


def peak_of(limits: MachineLimits, name: str, isa: str) -> Callable[[], float]:
    if name == "BF16" and isa in ("amx", "avx512"):
        return limits.amx_bf16_peak if isa == "amx" else limits.bf16_peak
    return limits.f32_peak if name in DENSE else limits.int8_peak


def measure(
    limits: MachineLimits, peak: Callable[[], float], chain: Chain, nbytes: int, ops: float, rounds: int
) -> dict[str, float]:
    chain.seconds()
    rows = []
    for _ in range(rounds):
        bandwidth, most = limits.read_bandwidth(), peak()
        taken = chain.seconds()
        rows.append((nbytes / taken, nbytes / taken / bandwidth, ops / taken, ops / taken / most if most else 0.0))
    rate, of_bandwidth, speed, of_peak = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "gb_s": round(rate / 1e9, 2),
        "of_bandwidth": round(of_bandwidth, 3),
        "gop_s": round(speed / 1e9, 1),
        "of_peak": round(of_peak, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=_native.isa())
    parser.add_argument("--formats", default=",".join((*DENSE, *sorted(GGUF))))
    parser.add_argument("--rows", default="1,2,3,4,5,6,7,8,16,32,512")
    parser.add_argument("--bytes", type=float, default=600e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--columns", type=int, default=3072)
    parser.add_argument("--depth", type=int, default=1024)
    args = parser.parse_args()
    limits = MachineLimits(args.threads)
    pool = _native.Pool(args.threads)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.formats.split(","):
        weights = matrices(name, args.columns, args.depth, args.bytes)
        found[name] = {}
        for rows in map(int, args.rows.split(",")):
            used = (
                weights[: max(1, len(weights) * 8 // rows)] if rows > 8 else weights
            )  # many rows: the time is arithmetic
            nbytes = sum(weight.nbytes for weight in used)
            ops = 2.0 * rows * args.columns * args.depth * len(used)
            chain = Chain(pool, args.isa, name, used, rows)
            found[name][str(rows)] = measure(limits, peak_of(limits, name, args.isa), chain, nbytes, ops, args.rounds)
    machine = {
        "read_gb_s": round(limits.read_bandwidth() / 1e9, 1),
        "int8_gop_s": round(limits.int8_peak() / 1e9),
        "f32_gflop_s": round(limits.f32_peak() / 1e9),
        "bf16_gflop_s": round(limits.bf16_peak() / 1e9),
        "bf16_matrix_gflop_s": round(limits.amx_bf16_peak() / 1e9),
    }
    shape = {"columns": args.columns, "depth": args.depth}
    print(
        json.dumps({"machine": machine, "threads": args.threads, "isa": args.isa, **shape, "formats": found}, indent=1)
    )


if __name__ == "__main__":
    main()
