"""Collectives of ranks that are threads of one process and meet at a barrier, over host arrays, and a device that has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backend.v1 import (
    API,
    HOST_DTYPES,
    Array,
    Collectives,
    CollectivesManifest,
    Device,
    DeviceInfo,
    Group,
    Manifest,
    MemoryInfo,
    Plan,
    Probe,
    Session,
    StepSession,
)


class GroupError(Exception):
    """The group has come to its end; the text is a sentence."""


class _Meeting:
    """Where the ranks of one group put what they have."""

    def __init__(self, group: Group) -> None:
        self.barrier = threading.Barrier(group.size, timeout=group.timeout)
        # In turn, so that nobody writes where others still read.
        self.given: list[list[tuple[Any, ...]]] = [[()] * group.size, [()] * group.size]


_meetings: dict[tuple[str, ...], _Meeting] = {}
_lock = threading.Lock()


class ThreadCollectives:
    """Sums are taken in the order of ranks."""

    fixed_order = True

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._turn = group.rank, group.size, 0
        with _lock:
            self._meeting = _meetings.setdefault(group.addresses, _Meeting(group))

    def all_reduce(self, value: Array) -> Array:
        return _sum(self._exchange("all_reduce", value))

    def all_gather(self, value: Array, axis: int = 0) -> Array:
        return np.concatenate(self._exchange("all_gather", value, axis), axis)

    def reduce_scatter(self, value: Array) -> Array:
        return _sum(self._mine(self._exchange("reduce_scatter", value)))

    def all_to_all(self, value: Array) -> Array:
        return np.concatenate(self._mine(self._exchange("all_to_all", value)))

    def close(self) -> None:
        """The others will wait for it in vain."""

    def _mine(self, values: Sequence[Array]) -> list[Array]:
        return [np.split(value, self.size)[self.rank] for value in values]

    def _exchange(self, op: str, value: Array, axis: int = 0) -> list[Array]:
        given = self._met(op, value, axis)
        if len({one[:-1] for one in given}) > 1:
            raise GroupError(f"The ranks call {op} with others than each other.")
        return [one[-1] for one in given]

    def _met(self, op: str, value: Array, axis: int) -> list[tuple[Any, ...]]:
        """What each rank called, and its value last."""
        given = self._meeting.given[self._turn]
        self._turn = 1 - self._turn
        given[self.rank] = (op, axis, value.shape, value.dtype, value.copy())
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise GroupError(f"Rank {self.rank} has lost another rank.") from None
        return list(given)


def _sum(values: Sequence[Array]) -> Array:
    if values[0].dtype == np.uint16:  # bf16
        wide = sum((value.astype(np.uint32) << 16).view(np.float32) for value in values)
        bits = np.asarray(wide).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.sum(values, axis=0, dtype=values[0].dtype)


class _OnDevice:
    """The same over a device's values."""

    fixed_order = True

    def __init__(self, device: Device, group: Group) -> None:
        self._device, self._host = device, ThreadCollectives(group)
        self.rank, self.size = group.rank, group.size
        self.close = self._host.close

    def _through(self, op: Callable[..., Array], value: Any, *more: Any) -> Any:
        return self._device.copy_in(op(self._device.copy_out(value), *more))

    def all_reduce(self, value: Any) -> Any:
        return self._through(self._host.all_reduce, value)

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        return self._through(self._host.all_gather, value, axis)

    def reduce_scatter(self, value: Any) -> Any:
        return self._through(self._host.reduce_scatter, value)

    def all_to_all(self, value: Any) -> Any:
        return self._through(self._host.all_to_all, value)


@dataclass
class _Box:
    """A value that cannot be taken for an array."""

    array: Array


class ThreadedDevice:
    """Eight methods, collectives, and ranks that are threads."""

    def alloc(self, shape: tuple[int, ...], dtype: str) -> _Box:
        return _Box(np.zeros(shape, HOST_DTYPES[dtype]))

    def free(self, value: _Box) -> None:
        value.array = np.zeros(0)

    def copy_in(self, array: Array) -> _Box:
        return _Box(np.array(array))

    def copy_out(self, value: _Box) -> Array:
        return value.array.copy()

    def fence(self) -> None:
        """Every call has finished when it returns."""

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(1 << 30, 1 << 30)

    def describe(self) -> DeviceInfo:
        return DeviceInfo(name="boxes", backend="threaded", writes="replace", ranks="threads")

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)

    def collectives(self, group: Group) -> Collectives:
        return _OnDevice(self, group)


def _open(index: int, options: Mapping[str, Any]) -> Device:
    return ThreadedDevice()


threads = CollectivesManifest("threads", API, lambda: Probe(True, "a barrier", score=-1), ThreadCollectives)
threaded = Manifest("threaded", API, lambda: Probe(True, "boxes", score=-1), _open, automatic=False)
