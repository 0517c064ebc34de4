"""A hub on localhost, and commands in processes of their own that know it by HF_ENDPOINT."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_models

sys.path.insert(0, str(Path(__file__).parent))  # hub_server.py

COMMAND = [sys.executable, "-m", "engine.cli.main"]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tiny_models.own_home(tmp_path / "home", monkeypatch)


@pytest.fixture(scope="session")
def gguf(tmp_path_factory) -> bytes:
    """A model with a chat template, as a GGUF file."""
    folder = tiny_models.write_talker(tmp_path_factory.mktemp("talker"))
    out = folder.parent / "talker.gguf"
    subprocess.run([*COMMAND, "quantize", str(folder), str(out), "-t", "Q8_0"], check=True, capture_output=True)
    return out.read_bytes()


@pytest.fixture(scope="session")
def large() -> bytes:
    """The contents of a file that comes in several pieces of 10 MB, which is what huggingface_hub writes at once."""
    return np.random.default_rng().bytes(28 << 20)


@pytest.fixture(scope="session")
def folder_files(tmp_path_factory) -> dict[str, bytes]:
    """A model as the files of a Hugging Face folder."""
    folder = tiny_models.write_talker(tmp_path_factory.mktemp("folder"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(home, gguf, large, folder_files, monkeypatch) -> Iterator:
    from hub_server import BELOW, Hub, Repo

    others = {"tiny-Q4_K_M.gguf": gguf[: len(gguf) // 2], "tiny-BF16.gguf": 2 * gguf}  # only their sizes matter
    repos = {
        "anna/tiny-GGUF": Repo({"README.md": b"# tiny", "tiny-Q8_0.gguf": gguf, "mmproj-tiny.gguf": b"GGUF", **others}),
        "anna/tiny": Repo(
            {**folder_files, **BELOW, **dict.fromkeys(("onnx/model.onnx", "onnx/config.json", "README.md"), b"no")}
        ),
        "anna/large-GGUF": Repo({"large-Q8_0.gguf": large}),
        "anna/gated": Repo({"gated-Q8_0.gguf": gguf}, gated=True),
        "anna/pictures": Repo({"README.md": b"no model", "unet.bin": b"x"}),
    }
    with Hub(repos) as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        yield started


@pytest.fixture
def engine() -> Callable[..., subprocess.CompletedProcess]:
    def call(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
        )

    return call


@pytest.fixture
def refusal(engine) -> Callable[..., str]:
    """Runs a command that cannot be done, and gives the one line that it says so in, of exit status 2."""

    def call(*arguments: object) -> str:
        done = engine(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done
        line = done.stderr.splitlines()[-1]
        assert line.startswith("engine: ") and "Traceback" not in done.stderr, done.stderr
        return line

    return call
