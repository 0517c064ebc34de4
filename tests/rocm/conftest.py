"""Torch's CPU tensors and Triton's interpreter in the place of a GPU."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture
def interpreted(monkeypatch):
    """Triton reads it when its kernels are first loaded. The interpreter computes with NumPy, which warns of the NaN that the kit
    sends through."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
