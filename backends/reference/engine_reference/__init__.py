"""The reference backend: eight methods over host arrays and no provider, so that every op runs by its NumPy reference."""

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
    available_memory,
)


class ReferenceDevice:
    """Values are host arrays themselves."""

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.zeros(shape, HOST_DTYPES[dtype])

    def free(self, value: Array) -> None:
        """Garbage collection does it."""

    def copy_in(self, array: Array) -> Array:
        return array

    def copy_out(self, value: Array) -> Array:
        return value

    def fence(self) -> None:
        """Every call has finished when it returns."""

    def memory_info(self) -> MemoryInfo:
        return available_memory()

    def describe(self) -> DeviceInfo:
        return DeviceInfo(name="host", backend="reference", dtypes=frozenset(HOST_DTYPES))

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)


def _open(index: int, options: Mapping[str, Any]) -> Device:
    return ReferenceDevice()


manifest = Manifest("reference", API, lambda: Probe(True, "NumPy, slow and exact.", score=0), _open, single=True)
