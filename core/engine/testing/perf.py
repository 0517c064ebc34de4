"""How near a device's providers come to the device's own limits, and where a model's time goes.

The limits are measured, not declared: bytes a second by the sum of two large arrays (``add``), operations a second by a
product of many rows with an F32 or F16 matrix, whichever is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..backend.v1 import Device, Dims, Frame, KVSpec, Provider, providers_of
from ..ops import OPS, Case, OpSpec
from ..ops.kv import PLAIN
from ..program.features import refusal
from .cases import random_weight
from .running import Bench

_SIZE, _HEADS, _KV, _DIM, _CONTEXT = 2048, 16, 4, 128, 2048
_ROUNDS, _SECONDS = 5, 0.05


@dataclass(frozen=True)
class Work:
    """A case with the bytes that it must move and the operations that it must do."""

    op: str
    case: Case
    bytes: int
    operations: int


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call; ``refused`` says why there is none."""

    work: Work
    seconds: float = 0.0
    refused: str | None = None

    def __str__(self) -> str:
        return "reference" if self.refused else f"{self.seconds * 1e6:.1f} us"

    @property
    def bandwidth(self) -> float:
        return self.work.bytes / self.seconds if self.seconds else 0.0

    @property
    def rate(self) -> float:
        return self.work.operations / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Limits:
    """Bytes and operations a second."""

    bandwidth: float
    rate: float

    def share(self, timing: Timing) -> float:
        """Of the time that the limits allow, how much is used: 1 at the limit."""
        floor = max(timing.work.bytes / self.bandwidth, timing.work.operations / self.rate)
        return floor / timing.seconds if timing.seconds else 0.0


def measure(device: Device, works: Iterator[Work], told: Callable[[str], None]) -> list[Timing]:
    """The times of all; ``told`` hears each as it comes, since they take minutes."""
    timings = []
    for work in works:
        timings.append(_timed(device, OPS[work.op], work))
        told(f"{work.op}, {work.case.name}: {timings[-1]}")
    return timings


def limits_of(timings: list[Timing]) -> Limits:
    """The best that any of the large plain cases reached."""
    return Limits(max(t.bandwidth for t in timings), max((t.rate for t in timings if t.rate), default=1.0))


def _timed(device: Device, spec: OpSpec, work: Work) -> Timing:
    bench = Bench(device, spec, work.case)
    why = f"{bench.info.backend} has no provider of {spec.name}."
    for provider in providers_of(device).get(spec.name, ()):
        refused = refusal(provider, bench.call) or bench.refusal(provider)
        if refused is None:
            return Timing(work, _seconds(bench, provider))
        why = refused
    return Timing(work, refused=why)


def _seconds(bench: Bench, provider: Provider) -> float:
    """Median over rounds of many calls each, after two for warm-up; what it measures ends with a fence."""
    fn, device = bench.bind(provider), bench.device
    with bench.loaded(provider, bench.case) as frame:
        for _ in range(2):
            fn(frame)
        device.fence()
        count = max(1, int(_SECONDS / max(_once(device, fn, frame, 1), 1e-7)))
        return median(_once(device, fn, frame, count) / count for _ in range(_ROUNDS))


def _once(device: Device, fn: Callable[[Frame], None], frame: Frame, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        fn(frame)
    device.fence()
    return time.perf_counter() - start


# -- cases of the size that models have ------------------------------------------------------------------------------


def plain_works(rng: np.random.Generator) -> Iterator[Work]:
    """Those that the limits come from."""
    shape = (512, 8 * _SIZE)
    a, b = (rng.standard_normal(shape, np.float32) for _ in range(2))
    yield Work("add", Case("large", Dims(T=512), {"a": a, "b": b}), 3 * a.nbytes, a.size)
    for format_ in ("F32", "F16"):
        yield _linear(rng, format_, 512)


def all_works(rng: np.random.Generator, formats: tuple[str, ...]) -> Iterator[Work]:
    for format_ in formats:
        for rows in (1, 8, 512):
            yield _linear(rng, format_, rows)
    for rows in (1, 512):
        yield from _rowwise(rng, rows)
    for dtype in ("f32", "f16", "bf16", "int16", "int8", "fp8"):
        yield _attention(rng, dtype, 1, _CONTEXT - 1)
        yield _attention(rng, dtype, 512, 0)


def _linear(rng: np.random.Generator, format_: str, rows: int) -> Work:
    weight = random_weight(rng, format_, (_SIZE, _SIZE))
    x = rng.standard_normal((rows, _SIZE), np.float32)
    case = Case(f"{format_} {rows} rows", Dims(T=rows), {"x": x}, {"weight": weight})
    return Work("linear", case, weight[1].nbytes + 2 * x.nbytes, 2 * rows * _SIZE * _SIZE)


def _rowwise(rng: np.random.Generator, rows: int) -> Iterator[Work]:
    x, y = (rng.standard_normal((rows, _SIZE), np.float32) for _ in range(2))
    norm = {"weight": random_weight(rng, "F32", (_SIZE,))}
    name, dims = f"{rows} rows", Dims(T=rows)
    yield Work("rms_norm", Case(name, dims, {"x": x}, norm, attrs={"eps": 1e-5}), 2 * x.nbytes, 4 * x.size)
    yield Work("gated_act", Case(name, dims, {"gate": x, "up": y}, attrs={"kind": "silu"}), 3 * x.nbytes, 8 * x.size)
    freq = {"inv_freq": random_weight(rng, "F32", (_DIM // 2,))}
    attrs = {"heads": _HEADS, "head_dim": _DIM, "interleaved": False}
    positions = np.arange(rows, dtype=np.int32)
    yield Work("rope", Case(name, dims, {"x": x, "positions": positions}, freq, attrs=attrs), 2 * x.nbytes, 6 * x.size)


def _attention(rng: np.random.Generator, dtype: str, rows: int, before: int) -> Work:
    blocks = (before + rows) // 16 + 2
    kv = KVSpec(blocks, 16, _KV, _DIM, dtype)
    states = {name: rng.standard_normal(PLAIN.shapes(kv)["k"][0], np.float32) for name in ("k", "v")}
    inputs = {
        "q": rng.standard_normal((rows, _HEADS * _DIM), np.float32),
        "seq_starts": np.array([before], np.int32),
        "query_offsets": np.array([0, rows], np.int32),
        "page_table": rng.permutation(np.arange(1, blocks, dtype=np.int32))[None],
    }
    attrs = {"heads": _HEADS, "kv_heads": _KV, "head_dim": _DIM, "scale": _DIM**-0.5, "block_size": 16}
    seen = sum(before + i + 1 for i in range(rows))
    size = {"f32": 4, "f16": 2, "bf16": 2, "int16": 2, "int8": 1, "fp8": 1}[dtype]
    moved = 2 * (before + rows) * _KV * _DIM * size + 2 * inputs["q"].nbytes
    case = Case(
        f"{dtype} KV, {rows} rows after {before}", Dims(T=rows, S=1, P=blocks - 1), inputs, {}, states, attrs, kv
    )
    return Work("attention", case, moved, 4 * seen * _HEADS * _DIM)


def as_rows(limits: Limits, timings: list[Timing]) -> list[tuple[str, ...]]:
    """A table: op, case, microseconds, GB/s, GOP/s, share of the limits."""
    rows: list[tuple[str, ...]] = [("op", "case", "us", "GB/s", "GOP/s", "share")]
    for t in timings:
        if t.refused is not None:
            rows.append((t.work.op, t.work.case.name, "-", "-", "-", "reference"))
            continue
        rates = f"{t.bandwidth / 1e9:.1f}", f"{t.rate / 1e9:.1f}"
        rows.append((t.work.op, t.work.case.name, f"{t.seconds * 1e6:.1f}", *rates, f"{limits.share(t):.0%}"))
    return rows
