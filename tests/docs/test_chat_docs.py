"""The tables of docs/chat.md and docs/configuration.md are those of the code. ENGINE_WRITE_DOCS=1 writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from engine.chat import commands, settings
from engine.cli.main import make_app

DOCS = Path(__file__).parents[2] / "docs"
TABLES = [
    ("chat.md", "commands", commands.table),
    ("configuration.md", "settings", settings.table),
    ("configuration.md", "tools", settings.tool_table),
]


@pytest.mark.parametrize(("file", "name", "table"), TABLES)
def test_tables_are_current(file, name, table):
    path = DOCS / file
    marks = re.compile(rf"(<!-- table:{name} -->\n).*?(<!-- end -->)", re.DOTALL)
    text = path.read_text()
    current = marks.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)
    if os.environ.get("ENGINE_WRITE_DOCS"):
        path.write_text(current)
    assert current == path.read_text(), "ENGINE_WRITE_DOCS=1 pytest tests/docs writes the table anew"
    assert marks.search(text)


def test_each_flag_of_the_table_is_one_of_the_command():
    import typer

    parameters = typer.main.get_command(make_app()).commands["chat"].params
    flags = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    for name in settings.Settings.model_fields:
        flag = settings.flag(name).strip("`")
        assert flag in flags or flag in ("", "MODEL"), flag
        assert flag or f"--{name.replace('_', '-')}" not in flags, f"{name} has a flag that the table does not know"
