"""The short form of benchmarks/serving_soak.py."""

from __future__ import annotations

import pytest
import serving_soak


@pytest.mark.slow
@pytest.mark.clock
def test_twice_what_the_server_takes():
    assert serving_soak.main(["--seconds", "20", "--no-write"]) == 0
