"""Collectives of ranks that are threads of one process, which meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from engine.backend.v1 import Array, Group


class Meeting:
    """Where the ranks of one group put what they have."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.given: list[Array | None] = [None] * size


_meetings: dict[tuple[str, ...], Meeting] = {}
_lock = threading.Lock()


class ThreadCollectives:
    """Sums are taken in the order of ranks."""

    fixed_order = True

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        with _lock:
            self._meeting = _meetings.setdefault(group.addresses, Meeting(group.size, group.timeout))

    def all_reduce(self, value: Array) -> Array:
        return self._exchange(value, lambda all_values: np.sum(all_values, axis=0, dtype=value.dtype))

    def all_gather(self, value: Array, axis: int = 0) -> Array:
        return self._exchange(value, lambda all_values: np.concatenate(all_values, axis))

    def reduce_scatter(self, value: Array) -> Array:
        return np.split(self.all_reduce(value), self.size)[self.rank]

    def all_to_all(self, value: Array) -> Array:
        return self._exchange(
            value, lambda found: np.concatenate([np.split(one, self.size)[self.rank] for one in found])
        )

    def close(self) -> None:
        self._meeting.barrier.abort()

    def _exchange(self, value: Array, join: Callable[[Sequence[Array]], Array]) -> Array:
        self._meeting.given[self.rank] = value
        self._meeting.barrier.wait()
        found = [one for one in self._meeting.given if one is not None]
        result = join(found)
        self._meeting.barrier.wait()
        return result
