"""Single calls of a GPU backend's ops on tensors of the benchmark's own, a clock, and limits of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from engine.backend.v1 import BoundCall, Call, Device, Dims, Frame, Limits, Value, providers_of
from engine.testing.cases import CaseWeight, random_weight
from engine_cuda.arrays import DTYPES

TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
PATTERN_ROWS = 64
OVERWRITES = 8
"""Of the cache before something is timed: they last longer than the host takes to launch it, or the GPU's waiting would count."""


@dataclass(frozen=True)
class Bench:
    """A device of engine_cuda or engine_rocm. ``rounds``: times that something is timed, after twice untimed."""

    device: Device
    where: torch.device
    rounds: int

    @cached_property
    def over(self) -> torch.Tensor:
        """Several times as large as a GPU's cache."""
        return torch.empty(1 << 28, dtype=torch.int8, device=self.where)

    @property
    def act(self) -> torch.dtype:
        return DTYPES[self.device.describe().roles["act"]]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.where, dtype=torch.float32).to(self.act)

    def matrix(self, format_: str, outputs: int, depth: int) -> CaseWeight:
        """Random rows, the same ones again and again."""
        name, rows, (few, _) = random_weight(np.random.default_rng(), format_, (min(outputs, PATTERN_ROWS), depth))
        return CaseWeight("weight", (name, np.tile(rows, (-(-outputs // few), 1))[:outputs], (outputs, depth)))

    def call(
        self, op: str, inputs: Mapping[str, torch.Tensor], output: str = "", states: Mapping[str, torch.Tensor] | None = None,
        weights: Mapping[str, CaseWeight] | None = None, **attrs: Any,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """A function that runs the op once and gives its first output, whose storage tag is ``output`` or that of
        activations."""
        values = {name: Value(n, name, ("T",), TAGS[t.dtype]) for n, (name, t) in enumerate(inputs.items())}
        states, weights = states or {}, weights or {}
        result = Value(100, "y", ("T",), output or TAGS[self.act])
        call = Call(op, values, (result,), weights, {name: name for name in states}, attrs)
        provider = providers_of(self.device)[op][0]
        packed = {name: provider.pack(ref, (op,), lambda _: None) for name, ref in weights.items()}
        run = provider.bind(BoundCall(call, provider, packed), Limits(Dims(), 0, 0))
        given = {values[name].id: tensor for name, tensor in inputs.items()}

        def once() -> torch.Tensor:
            frame = Frame(Dims(), dict(given), dict(states))
            run(frame)
            made: torch.Tensor = frame.values[100]
            return made

        return once

    def seconds(self, once: Callable[[], Any]) -> float:
        """The median of single runs; on a GPU by its own clock, with other memory in its cache before each."""
        for _ in range(2):
            once()
        return statistics.median(self._one(once) for _ in range(self.rounds))

    def _one(self, once: Callable[[], Any]) -> float:
        if self.where.type != "cuda":
            start = time.perf_counter()
            once()
            return time.perf_counter() - start
        for _ in range(OVERWRITES):
            self.over.zero_()
        # What was written would be brought to memory from the cache in the time of what is measured.
        torch.amax(self.over)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        once()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def copy_bandwidth(self, nbytes: int) -> float:
        """Bytes read and written a second."""
        source = torch.zeros(nbytes, dtype=torch.int8, device=self.where)
        target = torch.empty_like(source)
        return 2 * nbytes / self.seconds(lambda: target.copy_(source))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The greatest difference, as a part of the greatest size."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def exact_attention(
    inputs: dict[str, torch.Tensor], states: dict[str, torch.Tensor], attrs: Mapping[str, Any]
) -> torch.Tensor:
    """In float64, a sequence at a time."""
    rows = []
    for seq, table in enumerate(inputs["page_table"].long()):
        context = int(inputs["seq_starts"][seq]) + 1
        k, v = (as_double(states, n, table).flatten(0, 1)[:context] for n in ("k", "v"))
        q = inputs["q"][seq].double().view(attrs["kv_heads"], -1, attrs["head_dim"])
        shares = torch.einsum("hgd,nhd->hgn", q * attrs["scale"], k).softmax(-1)
        rows.append(torch.einsum("hgn,nhd->hgd", shares, v).flatten())
    return torch.stack(rows)


def as_double(states: dict[str, torch.Tensor], name: str, table: torch.Tensor) -> torch.Tensor:
    """The blocks of a cache."""
    stored = states[name][table]
    if stored.dtype == torch.uint8:
        return stored.view(torch.float8_e4m3fn).to(torch.float32).double()
    scale = states.get(f"{name}_scale")
    return stored.double() if scale is None else stored.double() * scale[table].double()[..., None]
