"""Programs of the tiny llama."""

from __future__ import annotations

import pytest

from engine.formats import open_checkpoint
from engine.models import load_model


@pytest.fixture(scope="session")
def model(llama):
    return load_model(open_checkpoint(llama))


@pytest.fixture(scope="session")
def program(model):
    return model.program(16, "f16")
