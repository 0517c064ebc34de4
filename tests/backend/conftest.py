"""The files by which a system tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """root({"sys/a/file": "its text", ...}) -> the folder in which the system's are."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        return tmp_path

    return write
