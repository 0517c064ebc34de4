"""How the tests run the command line: in this process, or as a person would, in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_models

from engine.cli.main import run

COMMAND = [sys.executable, "-m", "engine.cli.main"]


@dataclass(frozen=True)
class Finished:
    """A command's exit status and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Commands read and write nothing of the person who runs the tests."""
    return tiny_models.own_home(tmp_path / "home", monkeypatch)


@pytest.fixture
def engine(capsys) -> Callable[..., Finished]:
    """Runs a command in this process."""

    def call(*arguments: object) -> Finished:
        capsys.readouterr()
        status = run([str(a) for a in arguments])
        return Finished(status, *capsys.readouterr())

    return call


@pytest.fixture
def process() -> Callable[..., Finished]:
    """Runs a command in a process of its own; ``given`` is its input."""

    def call(*arguments: object, given: bytes = b"") -> Finished:
        command = [*COMMAND, *map(str, arguments)]
        done = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
        return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())

    return call


@pytest.fixture
def refusal(engine) -> Callable[..., str]:
    """Runs a command that is wrongly used, and gives the one line that it says so in."""

    def call(*arguments: object) -> str:
        done = engine(*arguments)
        assert (done.status, done.out) == (2, ""), done
        assert done.err.startswith("engine: ") and done.err.endswith("\n") and done.err.count("\n") == 1, done.err
        return done.err

    return call


@pytest.fixture(scope="session")
def talker(tmp_path_factory) -> Path:
    """A random llama with a chat template that answers in letters and, greedily, never ends by itself; its context is
    32768 tokens."""
    return tiny_models.write_talker(tmp_path_factory.mktemp("talker"))
