"""How the tests run the command line: in this process, or as a person would, in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from engine.cli.main import run

COMMAND = [sys.executable, "-m", "engine.cli.main"]
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'forbidden' %}{{ raise_exception('forbidden it is') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Finished:
    """A command's exit status and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


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
    folder = tmp_path_factory.mktemp("talker")
    tensors = tiny_models.llama_tensors(np.random.default_rng(5), tiny_models.CONFIG)
    tiny_models.write_tokenizer(folder)
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    others = [i for token, i in ids.items() if not (len(token) == 1 and token.isascii() and token.isalpha())]
    tensors["lm_head.weight"][others] = 0
    tiny_models.write_llama(folder, np.random.default_rng(5), tensors, max_position_embeddings=32768)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder
