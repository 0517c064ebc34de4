"""A good tiny model in both forms, taken apart so that each piece can be made wrong by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_models
from handmade import gguf_bytes, safetensors_of

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"


@dataclass
class GGUF:
    """Keys as (name, kind, value) and tensors as ``handmade.gguf_bytes`` takes them; ``settings`` are its other
    arguments, and ``finish`` may damage the bytes."""

    keys: list[tuple[Any, str, Any]]
    tensors: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[bytes], bytes] = bytes

    def key(self, name: str, kind: str, value: Any) -> GGUF:
        """The key in place of what was there."""
        self.drop(name).keys.append((name, kind, value))
        return self

    def drop(self, name: str) -> GGUF:
        self.keys = [entry for entry in self.keys if entry[0] != name]
        return self

    def value(self, name: str) -> Any:
        return next(entry[2] for entry in self.keys if entry[0] == name)

    def tensor(self, name: str) -> dict[str, Any]:
        return next(tensor for tensor in self.tensors if tensor["name"] == name)

    def write(self, folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(self.finish(gguf_bytes(self.keys, self.tensors, **self.settings)))
        return path


@dataclass
class Folder:
    """Files of a Hugging Face folder by name: bytes, or an object to write as JSON. ``tensors`` become
    model.safetensors unless ``files`` has one."""

    files: dict[str, Any]
    tensors: dict[str, np.ndarray[Any, Any]]

    def config(self, **keys: Any) -> Folder:
        self.files["config.json"] |= keys
        return self

    def write(self, folder: Path) -> Path:
        for name, content in ({"model.safetensors": safetensors_of(self.tensors)} | self.files).items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return folder


def good_folder(llama: Path) -> Folder:
    """The tiny llama of the tests, with a template."""
    read = {
        name: json.loads((llama / name).read_text())
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    }
    read["tokenizer_config.json"]["chat_template"] = TEMPLATE
    return Folder(read, tiny_models.load_file(llama / "model.safetensors"))


_KINDS = {
    gguf.GGUFValueType.STRING: "str",
    gguf.GGUFValueType.UINT32: "u32",
    gguf.GGUFValueType.INT32: "i32",
    gguf.GGUFValueType.FLOAT32: "f32",
    gguf.GGUFValueType.BOOL: "bool",
}


def good_gguf(path: Path) -> GGUF:
    """A GGUF of the tiny llama, as the gguf package reads it, with a template."""
    reader = gguf.GGUFReader(path)
    keys: list[tuple[Any, str, Any]] = []
    for name, entry in reader.fields.items():
        if name.startswith("GGUF."):
            continue
        kind = _KINDS[entry.types[-1]]
        keys.append((name, f"[{kind}]" if len(entry.types) > 1 else kind, entry.contents()))
    keys.append(("tokenizer.chat_template", "str", TEMPLATE))
    tensors = [
        {"name": t.name, "dims": [int(n) for n in t.shape], "type": int(t.tensor_type), "data": bytes(t.data.tobytes())}
        for t in reader.tensors
    ]
    return GGUF(keys, tensors)
