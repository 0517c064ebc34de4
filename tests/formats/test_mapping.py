"""Mapped files: what has been read can be let go, and read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.formats.mapping import map_file, release

SIZE = 64 << 20


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system has no /proc to ask for resident memory")
def test_released_bytes_leave_memory_and_can_be_read_again(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(np.random.default_rng().integers(0, 256, SIZE, np.uint8).tobytes())
    data = map_file(path)[100:].reshape(-1, 4)
    total = int(data.sum())
    held = resident_file_bytes()
    release(data.reshape(-1))
    assert held - resident_file_bytes() > SIZE * 0.9
    assert int(data.sum()) == total


def test_what_is_not_mapped_is_left_alone():
    data = np.arange(10, dtype=np.uint8)
    release(data)
    assert data.tolist() == list(range(10))
