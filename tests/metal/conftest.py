"""A device of the metal backend, and one whose kernels run through the shim."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("mlx.core")

from shim import Shim

from engine_metal.device import MetalDevice


@pytest.fixture(scope="session")
def shim_folder(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing, which compiles Metal kernels with the shim")
    return tmp_path_factory.mktemp("shim")


@pytest.fixture
def shim(shim_folder) -> Shim:
    return Shim(shim_folder)


@pytest.fixture(scope="session")
def device() -> MetalDevice:
    return MetalDevice({})
