"""What the kit's times take minutes for is told case by case."""

from __future__ import annotations

import numpy as np

from engine.backend.registry import open_device
from engine.backend.v1 import Dims
from engine.ops import Case
from engine.testing import perf


def test_each_case_is_told_before_the_next_is_measured(cpu):
    told = []

    def works():
        for name in ("first", "second"):
            told.append(f"{name} begins")
            a = np.ones((4, 64), np.float32)
            yield perf.Work("add", Case(name, Dims(T=4), {"a": a, "b": a}), 3 * a.nbytes, a.size)

    timings = perf.measure(open_device(cpu, {"threads": 1}), works(), told.append)
    assert told == [
        "first begins",
        f"add, first: {timings[0].seconds * 1e6:.1f} us",
        "second begins",
        f"add, second: {timings[1].seconds * 1e6:.1f} us",
    ]
