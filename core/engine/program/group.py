"""The ranks of a group, as a program's calls see them: ``all_reduce`` and ``all_gather`` on the device, where it has
collectives of its own, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.v1 import BoundCall, Call, Collectives, Device, Frame, Group, Limits, Packed, StepFn, WeightRef

OPS = ("all_reduce", "all_gather")


@dataclass(frozen=True)
class Rank:
    """One of the ranks that run a model together. ``own``: its device's collectives; without them those of the ``host``."""

    group: Group
    device: Device
    own: Collectives | None
    host: Collectives | None

    def provider(self, op: str) -> CollectiveProvider:
        joined = self.own or self.host
        assert joined is not None
        return CollectiveProvider(op, joined)

    def least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Of numbers that each rank has, the least that any has; all ranks must ask. At most 2^31 - 1."""
        mine = np.minimum(np.array([numbers], np.int64), 2**31 - 1).astype(np.int32)
        if self.own is not None:
            found = self.device.copy_out(self.own.all_gather(self.device.copy_in(mine)))
        else:
            assert self.host is not None
            found = self.host.all_gather(mine)
        return tuple(np.min(found, axis=0).tolist())

    def close(self) -> None:
        for joined in (self.own, self.host):
            if joined is not None:
                joined.close()


class CollectiveProvider:
    """An op of a group by its collectives, on values as these take them."""

    features: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    packer = "collectives"

    def __init__(self, op: str, joined: Collectives) -> None:
        self.op = op
        self.name = f"collectives/{op}"
        self.batch_invariant = op == "all_gather" or joined.fixed_order
        self._joined = joined

    def supports(self, call: Call) -> str | None:
        return None

    def wants(self, call: Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        raise NotImplementedError("A collective has no weights.")

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        x, y = bound.call.inputs["x"].id, bound.call.outputs[0].id
        joined, gathers = self._joined, self.op == "all_gather"

        def run(frame: Frame) -> None:
            value = frame.values[x]
            frame.values[y] = joined.all_gather(value, 1) if gathers else joined.all_reduce(value)

        return run
