"""Streams that are closed or full, disks without room and arguments that are no text: a sentence and a status, no defect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main
from engine.cli.plugin import write_project
from engine.errors import UsageError

COMMAND = f"{sys.executable} -m engine.cli.main"
ENDLESS = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@pytest.fixture
def shell(llama, talker):
    """Runs a line of the shell, in which MODEL and TALKER are models: (status, stdout, stderr)."""

    def call(line: str) -> tuple[int, str, str]:
        command = line.replace("engine", COMMAND, 1)
        given = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        given |= {"MODEL": str(llama), "TALKER": str(talker)}
        done = subprocess.run(["bash", "-c", command], env=given, capture_output=True, timeout=60, check=False)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return call


@ENDLESS
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("engine tokenize $MODEL --file /dev/zero", "engine: /dev/zero is larger than 256 MiB.\n"),
        ("engine generate $MODEL - </dev/zero", "engine: The input is larger than 256 MiB.\n"),
        ("engine generate $MODEL a --schema /dev/zero", "engine: /dev/zero is larger than 1 MiB.\n"),
        ("engine chat $TALKER -p a -f /dev/zero", "engine: /dev/zero is larger than 256 MiB.\n"),
        ("engine chat $TALKER -p a </dev/zero", "engine: The input is larger than 256 MiB.\n"),
        ("engine chat $TALKER --backend reference </dev/zero", "engine: The message is larger than 256 MiB.\n"),
    ],
)
def test_what_has_no_end_is_refused(shell, line, said):
    assert shell(line) == (2, "", said)


def test_pipes_in_the_place_of_files_are_read(shell):
    assert shell("engine tokenize $MODEL --file <(printf abc)") == shell("engine tokenize $MODEL abc")


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        pytest.param(
            "engine --help >/dev/full", 1, "The output cannot be written: No space left on device.", marks=FULL
        ),
        pytest.param(
            "engine tokenize $MODEL a >/dev/full",
            1,
            "The output cannot be written: No space left on device.",
            marks=FULL,
        ),
        pytest.param(
            "export PYTHONUNBUFFERED=1; engine tokenize $MODEL a >/dev/full",
            1,
            "cannot be written: No space",
            marks=FULL,
        ),
        ("engine --version >&-", 1, "The output cannot be written: Bad file descriptor."),
        ("engine tokenize $MODEL a >&-", 1, "The output cannot be written: Bad file descriptor."),
        ("engine tokenize $MODEL - <&-", 2, "The input cannot be read: Bad file descriptor."),
        ("engine chat $TALKER --backend reference <&-", 1, "The input cannot be read: stdin is closed."),
        ("engine serve $MODEL --host $'\\xff'", 2, 'The argument "\\xff" is not UTF-8'),
        ("engine chat --attach $'\\xff' -p a", 2, 'The argument "\\xff" is not UTF-8'),
        ("engine chat --search $'a\\xff'", 2, 'The argument "a\\xff" is not UTF-8'),
        ("engine plugin new mydev --folder /dev/null/mydev", 2, "cannot be written: Not a directory."),
    ],
)
def test_what_the_system_refuses_is_one_line(shell, line, status, said):
    done = shell(line)
    assert done[:2] == (status, ""), done
    last = done[2].splitlines()[-1]
    assert said in last and "defect" not in done[2] and "Traceback" not in done[2], done


def test_without_stderr_the_status_says_it(shell):
    assert shell("engine tokenize $MODEL a 2>&-") == (0, shell("engine tokenize $MODEL a")[1], "")
    assert shell("engine tokenize nothing a 2>&-") == (2, "", "")
    assert shell("engine tokenize nothing a <&- >&- 2>&-") == (2, "", "")


@FULL
def test_a_full_stderr_leaves_the_status(shell):
    assert shell("engine nothing 2>/dev/full") == (2, "", "")


def test_no_file_takes_the_number_of_a_closed_stream(shell, tmp_path):
    """Else the answer would be written into the database."""
    database = tmp_path / "chats.db"
    done = shell(f"engine chat $TALKER --backend reference --database {database} -p a --max-tokens 2 >&- 2>&-")
    assert done[0] == 1
    assert not database.exists() or database.read_bytes().startswith(b"SQLite format 3")


@pytest.mark.parametrize(
    ("named", "said"),
    [((), "The output, or a file, cannot be written"), (("there.gguf",), "there.gguf cannot be used")],
)
def test_a_full_disk_is_a_sentence(engine, monkeypatch, named, said):
    def app(*arguments: object, **settings: object) -> None:
        raise OSError(28, "No space left on device", *named)

    monkeypatch.setattr(main, "make_app", lambda *names: app)
    done = engine("pull")
    assert (done.status, done.out, done.err) == (1, "", f"engine: {said}: No space left on device.\n")


def test_a_starter_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        write_project("shiny", tmp_path / "file" / "engine-shiny")


def test_a_file_may_have_a_name_that_is_no_utf8(engine, llama, tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")
    Path(name).write_text("a")
    assert engine("tokenize", llama, "--file", name).out == engine("tokenize", llama, "a").out


@pytest.mark.parametrize(
    ("fault", "said"),
    [(MemoryError(), "no more memory"), (RuntimeError("can't start new thread"), "no more threads")],
)
def test_what_a_limit_forbids_is_no_defect(engine, monkeypatch, fault, said):
    def app(*_given, **_named):
        raise fault

    monkeypatch.setattr(main, "make_app", lambda *names: app)
    done = engine("list")
    assert (done.status, done.out) == (1, "") and done.err.startswith(f"engine: The system gives this process {said};")
