"""What all folders share: the backends to run on, and small checkpoints made without any other framework."""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import triton_interpreter
from hypothesis import HealthCheck, settings

from engine.backend.registry import open_device
from engine.errors import EngineError

BACKENDS = ("reference", "cpu", "metal")
SHARED = Path(__file__).parents[2] / "shared"
REQUIRE_ALL = bool(os.environ.get("ENGINE_TEST_REQUIRE_ALL"))

# A shell's background job has SIGINT ignored, and what it starts inherits that; tests interrupt what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton makes its own functions for its interpreter, or for a GPU, when it is first imported, which torch does, too. Here they
# are tested in the interpreter.
os.environ["TRITON_INTERPRET"] = "1"
with suppress(ImportError):
    importlib.import_module("triton.language")
    triton_interpreter.hasten()
del os.environ["TRITON_INTERPRET"]

# How long it takes is the machine's matter, as it is to draw; where nothing is cached yet Hypothesis first makes its table of
# characters.
settings.register_profile("engine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("engine")

# Tests draw fresh numbers in each run; with the seed that a run's first lines name, all are drawn again as they were there.
SEED = os.environ.setdefault("ENGINE_TEST_SEED", secrets.token_hex(8))
_seeded = np.random.default_rng
_stream = np.random.SeedSequence(0)


def _restart(name: str) -> None:
    global _stream  # noqa: PLW0603 -- one a process, as pytest's current test is
    _stream = np.random.SeedSequence(int.from_bytes(hashlib.sha256(f"{SEED} {name}".encode()).digest()))


def _fresh(seed=None):
    return _seeded(_stream.spawn(1)[0] if seed is None else seed)


_restart("collection")
np.random.default_rng = _fresh


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config) -> None:
    config.option.hypothesis_seed = config.option.hypothesis_seed or SEED


def pytest_report_header() -> str:
    return f"engine: ENGINE_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    _restart(item.nodeid)


def _no_skip(report):
    """Where every package is installed a skip is a failure, unless the folder beside the repository is wanted and not
    there."""
    excused = "../shared" in str(report.longrepr) and not SHARED.is_dir()
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail") and not excused:
        report.outcome, report.longrepr = "failed", f"ENGINE_TEST_REQUIRE_ALL is set, and this skips: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _no_skip((yield))


def _unavailable(name: str) -> str | None:
    try:
        open_device(name, {"threads": 2})
    except EngineError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def unavailable() -> dict[str, str | None]:
    """Backend -> why it cannot be opened here, or None."""
    return {name: _unavailable(name) for name in BACKENDS}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "metal")) for name in BACKENDS])
def backend(request, unavailable) -> str:
    """Each in-tree backend that can be opened here; metal, which is slow on MLX's CPU build, among the slow tests."""
    if unavailable[request.param]:
        pytest.skip(unavailable[request.param])
    return request.param


@pytest.fixture
def cpu(unavailable) -> str:
    """The CPU backend, for what only a real backend can show."""
    if unavailable["cpu"]:
        pytest.skip(unavailable["cpu"])
    return "cpu"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real vocabularies and a real model."""
    if not SHARED.is_dir():
        pytest.skip("../shared, which holds real vocabularies and a real model, is not there")
    return SHARED


@pytest.fixture(scope="session")
def stories() -> Path:
    """The folder of the stories260K model: a GGUF, and hf/ beside it."""
    folder = SHARED / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("../shared/models/stories260K is not there")
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """A random llama in a folder, with a byte-level tokenizer; its context is 256 tokens."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.write_llama(folder, np.random.default_rng(1))
    return folder


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution with entry points, as an outsider's wheel would: ``install(group, name, value, source)``,
    where source is the text of the module that the value names, or None if that exists."""

    def install(group: str, name: str, value: str, source: str | None = None) -> None:
        module = value.partition(":")[0]
        if source is not None:
            (tmp_path / f"{module}.py").write_text(source)
            monkeypatch.delitem(sys.modules, module, raising=False)
        info = tmp_path / f"{name}_{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}-{module.replace('_', '-')}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    return install
