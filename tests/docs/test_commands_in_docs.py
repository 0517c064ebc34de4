"""Each command line that the documents show is one that its command takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import typer

from engine.cli.main import make_app

ROOT = Path(__file__).parents[2]
TEXTS = (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/README.md"))
STARTER = (ROOT / "core" / "engine" / "cli" / "starter" / "README.md.txt",)


def _shown(path: Path) -> Iterator[list[str]]:
    """The words after ``engine`` of each such command in the blocks of code."""
    text = path.read_text()
    lines = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += [line for line in text.splitlines() if line.startswith("    ")]
    for line in lines:
        lexer = shlex.shlex(line.strip(), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a sentence, or a line of Python
            continue
        for ends, command in groupby(words, lambda word: word in ("|", "&&", "<", ">", ";")):
            name, *rest = command
            if not ends and name == "engine":
                yield rest


@pytest.mark.parametrize("path", (*TEXTS, *STARTER), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_command_shown_is_taken(path):
    root = typer.main.get_command(make_app())
    for shown in _shown(path):
        command, name, words = root, "engine", shown
        while hasattr(command, "commands") and not words[0].startswith("-"):
            name, words = words[0], words[1:]
            command = command.commands[name]
        if command is not root:
            command.make_context(name, words)  # refuses what the command does not take


def test_some_are_shown():
    assert ["doctor", "--backend", "mydev"] in list(_shown(*STARTER))
    assert ["chat", "-p", "what are you?"] in list(_shown(ROOT / "README.md"))
