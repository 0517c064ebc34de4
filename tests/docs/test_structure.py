"""docs/structure.md names the rooms that there are, and what is in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TEXT = (ROOT / "docs/structure.md").read_text()
ROWS = {
    folder.rstrip("/"): row.partition("|")[2]
    for row in re.findall(r"^\| (.*) \|$", _TEXT, re.M)
    for folder in re.findall(r"`([\w./]+/)`", row.partition("|")[0])
}
BESIDE = {file.name for file in (ROOT / "core/engine").glob("*.py")}
SOURCES = (".py", ".h", ".cpp", ".hip")


def test_each_room_has_a_row():
    rooms = [f for above in ("core/engine", "backends", "plugins") for f in (ROOT / above).iterdir() if f.is_dir()]
    rooms = [str(room.relative_to(ROOT)) for room in rooms if room.name not in ("__pycache__", "demo")]
    assert rooms and not [room for room in rooms if not any(row.startswith(room) for row in ROWS)]


@pytest.mark.parametrize("room", [room for room in ROWS if room.startswith(("core", "backends", "plugins"))])
def test_what_a_row_names_is_in_its_room(room):
    files = [file for file in (ROOT / room).rglob("*") if "__pycache__" not in file.parts]
    names = {file.name for file in files} | {file.stem for file in files}
    sources = "\n".join(file.read_text() for file in files if file.suffix in SOURCES)
    named = [each.rstrip("/") for each in re.findall(r"`([\w./]+)`", ROWS[room])]
    missing = [
        each
        for each in named
        if each.rpartition("/")[2] not in names | BESIDE
        and not re.search(rf"\b{re.escape(each)}\b", sources)
        and not (ROOT / each).exists()
    ]
    assert not missing, missing
