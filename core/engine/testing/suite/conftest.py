"""The backend under examination, its device, and a seed that reports name."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend.registry import open_device
from engine.testing.checks import ops_of
from engine.testing.plugin import device_options

_FILES = {"support": ("test_support",), "test": ("test_device", "test_ops", "test_programs"), "perf": ("test_perf",)}
_FILES["fuzz"] = ("test_fuzz",)


def pytest_ignore_collect(collection_path, config):
    name = collection_path.stem
    return True if name.startswith("test_") and name not in _FILES[config.getoption("--mode")] else None


def pytest_report_header(config):
    return f"engine: backend {config.getoption('--engine-backend')}, seed {_seed(config)}"


def _seed(config) -> int:
    if not hasattr(config, "engine_seed"):
        given = config.getoption("--engine-seed")
        config.engine_seed = given if given is not None else int(np.random.SeedSequence().entropy % 2**32)
    return config.engine_seed


def _open(config):
    if not hasattr(config, "engine_device"):
        name = config.getoption("--engine-backend")
        if not name:
            raise pytest.UsageError("--engine-backend NAME says which backend to examine.")
        config.engine_device = open_device(name, device_options(config))
    return config.engine_device


def pytest_generate_tests(metafunc):
    if "op" in metafunc.fixturenames:
        metafunc.parametrize("op", list(ops_of(_open(metafunc.config))))


@pytest.fixture(scope="session")
def device(pytestconfig):
    return _open(pytestconfig)


@pytest.fixture(scope="session")
def backend(pytestconfig) -> str:
    return pytestconfig.getoption("--engine-backend")


@pytest.fixture
def rng(pytestconfig) -> np.random.Generator:
    return np.random.default_rng(_seed(pytestconfig))
