"""A backend of the eight Device methods and nothing else, as an outsider would begin one.

Its memory is a private dictionary of bytes, and a value is a number into it: an array that was not copied in, or not
copied out, cannot be used by mistake. It counts its copies and what lives in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.backend.v1 import (
    API,
    HOST_DTYPES,
    Array,
    Device,
    DeviceInfo,
    Manifest,
    MemoryInfo,
    Plan,
    Probe,
    Session,
    StepSession,
)


class ToyDevice:
    def __init__(self) -> None:
        self._memory: dict[int, tuple[bytes, tuple[int, ...], str]] = {}
        self._next = 1000
        self.copies_in = 0
        self.copies_out = 0
        self.most_alive = 0

    def alloc(self, shape: tuple[int, ...], dtype: str) -> int:
        return self._keep(np.zeros(shape, HOST_DTYPES[dtype]))

    def free(self, value: int) -> None:
        del self._memory[value]

    def copy_in(self, array: Array) -> int:
        self.copies_in += 1
        return self._keep(array)

    def copy_out(self, value: int) -> Array:
        self.copies_out += 1
        data, shape, dtype = self._memory[value]
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def fence(self) -> None:
        """Every call has finished when it returns."""

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(1 << 30, 1 << 30)

    def describe(self) -> DeviceInfo:
        return DeviceInfo(name="a dictionary", backend="toy", writes="replace")

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)

    def _keep(self, array: Array) -> int:
        self._next += 1
        self._memory[self._next] = array.tobytes(), array.shape, array.dtype.str
        self.most_alive = max(self.most_alive, len(self._memory))
        return self._next

    @property
    def alive(self) -> int:
        return len(self._memory)


def _open(index: int, options: Mapping[str, Any]) -> Device:
    return ToyDevice()


manifest = Manifest("toy", API, lambda: Probe(True, "a dictionary of bytes", score=-1), _open)
