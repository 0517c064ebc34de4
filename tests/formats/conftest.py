"""Writers of model files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handmade import gguf_bytes


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF of the given keys and tensors, or of ready bytes."""

    def write(*args: Any, name: str = "model.gguf", data: bytes | None = None, **options: Any) -> Path:
        path = tmp_path / name
        path.write_bytes(gguf_bytes(*args, **options) if data is None else data)
        return path

    return write


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder: bytes as they are, other values as JSON; a plain config.json unless given."""

    def write(files: dict[str, Any]) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        for name, content in ({"config.json": {"model_type": "llama"}} | files).items():
            if content is not None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                (folder / name).write_bytes(data)
        return folder

    return write
