"""A device of the metal backend, and one whose kernels run through the shim."""

from __future__ import annotations

import shutil

import pytest


def pytest_pycollect_makemodule(module_path, parent):
    """The modules of this folder import MLX at once."""
    pytest.importorskip("mlx.core")


@pytest.fixture(scope="session")
def shim_folder(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing, which compiles Metal kernels with the shim")
    return tmp_path_factory.mktemp("shim")


@pytest.fixture
def shim(shim_folder):
    from shim import Shim

    return Shim(shim_folder)


@pytest.fixture(scope="session")
def device():
    from engine_metal.device import MetalDevice

    return MetalDevice({})
