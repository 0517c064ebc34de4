"""Results that are written whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.quantize.output import check_target, replacing, replacing_folder


def test_two_that_write_the_same_file_do_not_mix(tmp_path):
    out = tmp_path / "out.gguf"
    with replacing(out) as first:
        first.write(b"first" * 1000)
        with pytest.raises(KeyboardInterrupt), replacing(out) as broken_off:
            broken_off.write(b"broken off")
            raise KeyboardInterrupt
        with replacing(out) as second:
            second.write(b"second")
        assert out.read_bytes() == b"second"
    assert out.read_bytes() == b"first" * 1000
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_two_that_write_the_same_folder_do_not_mix(tmp_path):
    out = tmp_path / "out"
    with replacing_folder(out) as first:
        (first / "config.json").write_text("first")
        with replacing_folder(out) as second:
            (second / "config.json").write_text("second")
    assert (out / "config.json").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def _replaced(out):
    out.mkdir()
    (out / "config.json").write_text("before")
    with replacing_folder(out) as part:
        (part / "config.json").write_text("after")


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_a_folder_whose_replacement_ends_in_the_middle_is_there(tmp_path, monkeypatch, call, fault):
    out, replace, calls = tmp_path / "out", os.replace, []

    def broken(source, target):
        calls.append(target)
        if len(calls) == call + 1:
            raise fault
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(KeyboardInterrupt if fault is KeyboardInterrupt else UsageError):
        _replaced(out)
    assert (out / "config.json").read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_behind_a_link_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to("out")
    _replaced(tmp_path / "out")
    with replacing_folder(tmp_path / "link") as part:
        (part / "config.json").write_text("again")
    assert (tmp_path / "out" / "config.json").read_text() == "again"
    assert {p.name for p in tmp_path.iterdir()} == {"out", "link"}


@pytest.mark.parametrize("force", [False, True])
def test_a_file_in_the_place_of_a_folder_is_refused_at_once(tmp_path, force):
    with pytest.raises(UsageError, match="is a folder; give the name of a file in it"):
        check_target(tmp_path, tmp_path / "model.gguf", 0, force)
    check_target(tmp_path, tmp_path / "model", 0, force=True, is_folder=True)


def test_what_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    check_target(tmp_path / "out", tmp_path / "model.gguf", 0, force=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="o cannot be written: File name too long"):
        check_target(tmp_path / ("o" * 250), tmp_path / "model.gguf", 0, force=False)

    def refused(*arguments, **settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)  # root may write anywhere
    with pytest.raises(UsageError, match="out cannot be written: Permission denied"):
        check_target(tmp_path / "out", tmp_path / "model.gguf", 0, force=False)


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is a device or a pipe"):
        check_target(tmp_path / "pipe", tmp_path / "model.gguf", 0, force=True)


def test_nothing_is_left_of_a_trial_that_is_ended(tmp_path, monkeypatch):
    """By a signal, when a file has its name and before it is removed."""

    def ended(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", ended)
        patch.setattr(Path, "unlink", ended)
        with suppress(KeyboardInterrupt):
            check_target(tmp_path / "out", tmp_path / "model.gguf", 0, force=False)
    assert not list(tmp_path.iterdir())
