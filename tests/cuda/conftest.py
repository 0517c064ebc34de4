"""The CUDA backend on torch's CPU tensors, its kernels in Triton's interpreter."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Triton reads it when the kernels are first loaded, and the backend's probe whenever it is asked. The interpreter computes
    with NumPy, which warns of the NaN that the kit sends through."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture
def device(interpreted):
    """Skips where torch or Triton is missing, which is on every system but Linux on x86-64."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from engine.backend.registry import open_device

    return open_device("cuda", {})
