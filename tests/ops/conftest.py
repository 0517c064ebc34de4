import numpy as np
import pytest


@pytest.fixture
def rng():
    """Fresh input on every run."""
    return np.random.default_rng()
