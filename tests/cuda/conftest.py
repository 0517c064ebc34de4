"""The CUDA backend on torch's CPU tensors, its kernels in Triton's interpreter."""

from __future__ import annotations

import os
import warnings

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when the kernels are first loaded


@pytest.fixture(scope="session")
def device():
    """Skips where torch or Triton is missing, which is on every system but Linux on x86-64."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from engine.backend.registry import open_device

    return open_device("cuda", {})


@pytest.fixture(autouse=True)
def quiet():
    """The interpreter computes with NumPy, which warns of the NaN that the kit sends through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
