"""What is written for a person moves no cursor and reorders nothing."""

from __future__ import annotations

import pytest

from engine.console.notes import note, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\x9bc\rd\n\te é東🙂", "a\ufffd[2Jb\ufffdc\ufffdd\n\te é東🙂"),
        ("exe\u202egnp.\u202c", "exe\ufffdgnp.\ufffd"),
        ("\u2066a\u2069", "\ufffda\ufffd"),
        ("👩\u200d💻 \u05d0\u200f", "👩\u200d💻 \u05d0\u200f"),
    ],
)
def test_visible(text, shown):
    assert visible(text) == shown


def test_a_note_is_visible(capsys):
    note("There is no \x1b[2J.gguf.")
    assert capsys.readouterr().err == "engine: There is no \ufffd[2J.gguf.\n"
