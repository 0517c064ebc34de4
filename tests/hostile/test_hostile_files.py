"""Every kind of broken model ends the command in one line, in under a second of the processor, and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from broken_models import CHAT_KINDS, FOLDER_KINDS, GGUF_KINDS, TEMPLATE_BOMBS, build
from good_models import GGUF, Folder, good_folder, good_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = 0.6  # beside the imports, which take some 0.4
OF_A_TEMPLATE = 0.6  # seconds that rendering may take, and ending it
MEMORY = 45 << 20  # above what `engine --version` takes with all that is imported, and the size of the file
LAUNCHER = Path(__file__).with_name("launcher.py")


class Launcher:
    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, str(LAUNCHER)], stdin=pipe, stdout=pipe, text=True)

    def run(self, *arguments: str) -> tuple[int, float, int, str]:
        """Exit status, seconds of CPU, peak bytes and stderr of ``engine ARGUMENTS``."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        status, seconds, memory, errors = json.loads(self._process.stdout.readline())
        return status, seconds, memory, errors

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Commands keep and read nothing of the person who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        yield tiny_models.own_home(tmp_path_factory.mktemp("home"), patch)


@pytest.fixture(scope="module")
def launchers(home: Path) -> Iterator[list[Launcher]]:
    made = [Launcher() for _ in range(2)]
    yield made
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def folder(llama: Path) -> Folder:
    return good_folder(llama)


@pytest.fixture(scope="module")
def gguf_model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> GGUF:
    return good_gguf(tiny_models.to_gguf(llama, tmp_path_factory.mktemp("good") / "model.gguf"))


def _arguments(name: str, path: Path) -> list[str]:
    if name in CHAT_KINDS or name in TEMPLATE_BOMBS:
        return ["chat", str(path), "-p", "hi", "--max-tokens", "1"]
    return ["generate", str(path), "hi", "--max-tokens", "1"]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


def _fault(launcher: Launcher, name: str, path: Path, base: int, good: Path) -> str | None:
    """What is wrong with how the command takes a broken model, or None."""
    status, seconds, memory, errors = launcher.run(*_arguments(name, path))
    allowed = SECONDS
    for _ in range(3):  # a busy machine's processors are slower now and then, and a good model takes longer, too
        if seconds > allowed:
            allowed = max(allowed, launcher.run(*_arguments(name, good))[1] + OF_A_TEMPLATE)
            seconds = min(seconds, launcher.run(*_arguments(name, path))[1])
    wrong = []
    if status != 2:
        wrong.append(f"exit status {status}")
    if errors.count("\n") != 1 or not errors.startswith("engine: ") or "(a defect" in errors:
        wrong.append("not one line of ours")
    if seconds > allowed:
        wrong.append(f"{seconds:.2f} s")
    if memory > base + MEMORY + _size(path):
        wrong.append(f"{(memory - base) >> 20} MiB")
    return f"{name}: {', '.join(wrong)}: {errors[:300]}" if wrong else None


def _faults(launchers: list[Launcher], kinds: dict, good: GGUF | Folder, tmp_path: Path) -> list[str]:  # type: ignore[type-arg]
    base = min(launcher.run("--version")[2] for launcher in launchers)
    good_path = good.write(tmp_path)

    def share(number: int) -> list[str]:
        found = []
        for place, name in list(enumerate(kinds))[number :: len(launchers)]:
            where = tmp_path / str(place)
            where.mkdir()
            fault = _fault(launchers[number], name, build(kinds[name], good).write(where), base, good_path)
            found.extend([fault] if fault else [])
        return found

    with ThreadPoolExecutor(len(launchers)) as pool:
        return [fault for faults in pool.map(share, range(len(launchers))) for fault in faults]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_good_models_run(
    command: str, launchers: list[Launcher], folder: Folder, gguf_model: GGUF, home: Path, tmp_path: Path
) -> None:
    for good in (folder, gguf_model):
        path = good.write(tmp_path)
        status, _, _, errors = launchers[0].run(*_arguments(CHAT_KINDS[0] if command == "chat" else "", path))
        assert status == 0, errors
    assert command != "chat" or list(home.rglob("chats.db")), "the chats are kept in somebody's own folder"


def test_the_memory_measured_is_the_commands(launchers: list[Launcher]) -> None:
    assert np.zeros(1 << 27, np.uint8).any() == 0  # what pytest takes must not show
    assert launchers[0].run("--version")[2] < 64 << 20


def test_broken_ggufs(launchers: list[Launcher], gguf_model: GGUF, tmp_path: Path) -> None:
    assert len(GGUF_KINDS) > 100
    assert not _faults(launchers, GGUF_KINDS, gguf_model, tmp_path)


def test_broken_folders(launchers: list[Launcher], folder: Folder, tmp_path: Path) -> None:
    assert len(FOLDER_KINDS) > 100
    assert not _faults(launchers, FOLDER_KINDS, folder, tmp_path)


def _with_template(source: str):  # type: ignore[no-untyped-def]
    return lambda folder: folder.files["tokenizer_config.json"].update(chat_template=source)


def test_template_bombs(launchers: list[Launcher], folder: Folder, tmp_path: Path) -> None:
    kinds = {name: _with_template(source) for name, source in TEMPLATE_BOMBS.items()}
    assert not _faults(launchers, kinds, folder, tmp_path)
