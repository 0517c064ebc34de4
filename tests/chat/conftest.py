"""The chat as a person meets it: in this process with lines piped in, or in a terminal of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_models

from engine.cli.main import run

sys.path.insert(0, str(Path(__file__).parent))  # server.py and terminal.py


@dataclass(frozen=True)
class Finished:
    """A command's exit status and what it wrote."""

    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Chats keep and read nothing of the person who runs the tests."""
    return tiny_models.own_home(tmp_path / "home", monkeypatch)


@pytest.fixture(scope="session")
def talker(tmp_path_factory) -> Path:
    return tiny_models.write_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture
def chat(capsys, monkeypatch) -> Callable[..., Finished]:
    """Runs ``engine chat`` in this process; ``given`` is what is piped into it."""

    def call(*arguments: object, given: str = "") -> Finished:
        piped = io.BytesIO(given.encode("utf-8", "surrogateescape"))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, encoding="latin-1"))  # whatever a locale says
        capsys.readouterr()
        status = run(["chat", *map(str, arguments)])
        return Finished(status, *capsys.readouterr())

    return call


@pytest.fixture
def server() -> Iterator:
    from server import Server

    with Server() as started:
        yield started
        started.release.set()
        started.shutdown()


@pytest.fixture
def terminal() -> Iterator[Callable]:
    """Starts a chat in a terminal, and waits for its prompt."""
    pytest.importorskip("pexpect", reason="pexpect is not installed")
    pytest.importorskip("pyte", reason="pyte is not installed")
    from terminal import Terminal

    started = []

    def start(*arguments: object, **settings):
        child = Terminal([str(a) for a in arguments], **settings)
        started.append(child)
        child.wait_prompt()
        return child

    yield start
    for child in started:
        child.close()
