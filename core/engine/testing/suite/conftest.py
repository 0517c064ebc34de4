"""The backend under examination, its device, and a seed that reports name."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend.joining import check_name
from engine.backend.registry import open_device
from engine.backend.v1 import collectives_of
from engine.errors import BackendError
from engine.runtime import load
from engine.testing.checks import ops_of
from engine.testing.collectives import Subject
from engine.testing.plugin import device_options

_FILES = {"support": ("test_support",), "perf": ("test_perf",)}
_FILES["test"] = ("test_device", "test_ops", "test_programs", "test_collectives")
_FILES["fuzz"] = ("test_fuzz",)


def pytest_ignore_collect(collection_path, config):
    name = collection_path.stem
    if config.getoption("--engine-collectives"):
        return True if name.startswith("test_") and name != "test_collectives" else None
    return True if name.startswith("test_") and name not in _FILES[config.getoption("--mode")] else None


def pytest_collection_modifyitems(config):
    if name := config.getoption("--engine-collectives"):
        try:
            check_name(name)
        except BackendError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_report_header(config):
    examined = config.getoption("--engine-collectives") or f"backend {config.getoption('--engine-backend')}"
    return f"engine: {examined}, seed {_seed(config)}"


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


@pytest.fixture(autouse=True)
def _options_of_programs(pytestconfig, monkeypatch):
    """Whole programs open the device as a user would; the kit's options are theirs, too."""
    given, examined = device_options(pytestconfig), pytestconfig.getoption("--engine-backend")

    def opened(name, options, index=0):
        return open_device(name, {**options, **given} if name == examined else options, index)

    monkeypatch.setattr(load, "open_device", opened)


@pytest.fixture(scope="session")
def backend(pytestconfig) -> str:
    return pytestconfig.getoption("--engine-backend")


@pytest.fixture(scope="session")
def subject(pytestconfig) -> Subject:
    """The collectives to examine; a backend's, which may have none."""
    if name := pytestconfig.getoption("--engine-collectives"):
        return Subject(name)
    device = _open(pytestconfig)
    if collectives_of(device) is None:
        pytest.skip("the device offers no collectives of its own.")
    options = device_options(pytestconfig)
    return Subject("", pytestconfig.getoption("--engine-backend"), options, device.describe().ranks)


@pytest.fixture
def rng(pytestconfig) -> np.random.Generator:
    return np.random.default_rng(_seed(pytestconfig))
