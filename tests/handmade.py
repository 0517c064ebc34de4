"""Files written by hand, byte by byte, so that they can be wrong in every way."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

SCALARS = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<?"),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
}


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_value(kind: str, value: Any) -> bytes:
    """The type and the value of a key; `str`, `[i32]`, `[[u8]]` and the like, or `raw` for ready bytes."""
    if kind == "raw":
        return bytes(value)
    if kind == "str":
        return struct.pack("<I", 8) + gguf_string(value)
    if kind.startswith("["):
        elements = [gguf_value(kind[1:-1], element) for element in value]
        element_type = elements[0][:4] if elements else gguf_value(kind[1:-1], "" if kind == "[str]" else 0)[:4]
        return struct.pack("<I", 9) + element_type + struct.pack("<Q", len(value)) + b"".join(e[4:] for e in elements)
    number, code = SCALARS[kind]
    return struct.pack("<I", number) + struct.pack(code, value)


def gguf_bytes(
    keys: Sequence[tuple[Any, str, Any]] = (("general.architecture", "str", "llama"),),
    tensors: Sequence[dict[str, Any]] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
    tail: int = 0,
) -> bytes:
    """A GGUF.  A tensor is dims (GGUF's order), data, and perhaps name, type and offset in place of the right ones."""
    out = bytearray(struct.pack("<4sI", magic, version))
    out += struct.pack(
        "<QQ",
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    for name, kind, value in keys:
        out += gguf_string(name) + gguf_value(kind, value)
    body = bytearray()
    for number, tensor in enumerate(tensors):
        dims = tensor["dims"]
        out += gguf_string(tensor.get("name", f"t{number}")) + struct.pack("<I", tensor.get("n_dims", len(dims)))
        out += struct.pack(f"<{len(dims)}Q", *dims)
        out += struct.pack("<IQ", tensor.get("type", 0), tensor.get("offset", len(body)))
        body += tensor["data"]
        body += bytes(-len(body) % alignment)
    if tensors:
        out += bytes(-len(out) % alignment)
    return bytes(out + body) + bytes(tail)


def safetensors_bytes(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def safetensors_of(tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    names = {np.dtype("f4"): "F32", np.dtype("f2"): "F16", np.dtype("u2"): "BF16", np.dtype("i8"): "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in tensors.items():
        begin = len(body)
        body += array.tobytes()
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [begin, len(body)]}
    return safetensors_bytes(header, body)
