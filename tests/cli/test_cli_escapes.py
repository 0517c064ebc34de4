"""A terminal obeys no escape sequence that a model or a file has written; a file and a pipe get it as it is."""

from __future__ import annotations

import sys

import pytest
import tiny_models

COLOURED = r"\x1b\[31mred"


@pytest.fixture
def typed():
    """What a command writes to a terminal."""
    pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")

    def run(*arguments: object) -> str:
        command = ["-m", "engine.cli.main", *map(str, arguments)]
        return pexpect.spawn(sys.executable, command, encoding="utf-8", dimensions=(30, 200), timeout=60).read()

    return run


def test_of_a_text(typed, process):
    arguments = ("generate", "Once", "--regex", COLOURED, "--backend", "reference")
    assert process(*arguments).out == "\x1b[31mred\n"
    shown = typed(*arguments)
    assert "\ufffd[31mred" in shown and "\x1b[31m" not in shown


def test_of_a_file(typed, llama, tmp_path):
    path = tiny_models.to_gguf(llama, tmp_path / "\x1b[2Jm.gguf", **{"_license_": "free\x1b[31m"})
    path.write_bytes(path.read_bytes().replace(b"llama._license_", b"general.license"))
    shown = typed("show", path)
    assert "free\ufffd[31m" in shown and "\ufffd[2Jm.gguf" in shown and "\x1b[" not in shown


def test_of_a_fault(typed, tmp_path):
    (tmp_path / "\x1b[2Jm.gguf").write_bytes(b"none")
    shown = typed("show", tmp_path / "\x1b[2Jm.gguf")
    assert "\ufffd[2Jm.gguf" in shown and "\x1b[" not in shown
