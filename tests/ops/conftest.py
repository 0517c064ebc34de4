import numpy as np
import pytest


@pytest.fixture
def rng(request):
    """Fresh input on every run; a failure prints the seed."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)
