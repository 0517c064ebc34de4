"""Memory of weights goes back to the system when they are freed, whatever lies between them."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from one_kernel import native
from weight_cases import alloc


@pytest.mark.skipif(not psutil.LINUX, reason="elsewhere the C library decides")
def test_freed_weights_leave_no_memory():
    process, between = psutil.Process(), []

    def filled(columns: int, depth: int):
        weight = alloc("F32", columns, depth)
        native.pack_into(weight, np.full((columns, depth * 4), 1, np.uint8))
        return weight

    def round_of_weights() -> int:
        before, held = process.memory_info().rss, []
        for megabytes in (3, 5, 9, 4) * 4:
            held.append(filled(1024, megabytes << 8))
            between.extend(filled(64, 64) for _ in range(4))
        assert process.memory_info().rss - before > 40 << 20
        del held
        return int(process.memory_info().rss)

    first = round_of_weights()
    for _ in range(3):
        last = round_of_weights()
    assert last - first < 16 << 20
