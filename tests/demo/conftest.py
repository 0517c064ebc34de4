"""The built-in demo model, loaded once, and what answers a question with it."""

from __future__ import annotations

import pytest
from demo.examine import HeldOut
from demo.sitting import Sitting


@pytest.fixture(scope="session")
def held_out() -> HeldOut:
    return HeldOut.read()


@pytest.fixture(scope="session")
def demo():
    with Sitting() as sitting:
        yield sitting
