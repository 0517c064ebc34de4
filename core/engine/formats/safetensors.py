"""safetensors files, read with checks of our own (format: huggingface/safetensors, README).

A file is u64 header length, a JSON header, and the tensors' bytes without gaps.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from engine.errors import FormatError
from engine.formats.checkpoint import Tensor
from engine.formats.jsonfile import parse_object
from engine.formats.mapping import map_file
from engine.formats.quantformats import FORMATS

_MAX_HEADER = 100_000_000  # bytes, the format's own limit
_MAX_DIMS = 16


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped, in the file's order."""
    data = map_file(path)
    if len(data) < 8:
        _fail(path, f"it has {len(data)} bytes, fewer than a header's length")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_MAX_HEADER, len(data) - 8):
        _fail(path, f"its header claims {length} bytes of a file of {len(data)}")
    header = parse_object(data[8 : 8 + length].tobytes(), f"the header of {path}", unique=True)
    header.pop("__metadata__", None)
    body = data[8 + length :]
    spans = sorted((_span(path, name, entry), name) for name, entry in header.items())
    tensors = {}
    expected = 0
    for (begin, end), name in spans:
        if begin != expected:
            _fail(path, f"tensor {name!r} begins at {begin} where {expected} is next: tensors overlap or leave a gap")
        if end > len(body):
            _fail(path, f"tensor {name!r} ends at {end} of {len(body)} bytes; is the file cut short?")
        expected = end
        entry = header[name]
        tensors[name] = Tensor(name, tuple(entry["shape"]), FORMATS[entry["dtype"]], body[begin:end])
    if expected != len(body):
        _fail(path, f"{len(body) - expected} bytes at its end belong to no tensor")
    return tensors


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Begin and end of a tensor whose dtype, shape and size agree."""
    if not isinstance(entry, dict):
        _fail(path, f"the entry of tensor {name!r} is not an object")
    form = FORMATS.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if form is None or form.block != 1:
        plain = ", ".join(form.name for form in FORMATS.values() if form.block == 1)
        _fail(path, f"tensor {name!r} has the dtype {entry.get('dtype')!r}, which is none of {plain}")
    shape, span = entry.get("shape"), entry.get("data_offsets")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMS:
        _fail(path, f"tensor {name!r} has no shape of at most {_MAX_DIMS} whole numbers")
    if not _is_sizes(span) or len(span) != 2:
        _fail(path, f"tensor {name!r} has no two data_offsets")
    begin, end = span
    if end - begin != math.prod(shape) * form.block_bytes:
        _fail(path, f"tensor {name!r} has {end - begin} bytes, which is not {form.name} of the shape {shape}")
    return begin, end


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _fail(path: Path, reason: str) -> NoReturn:
    raise FormatError(f"{path} is not a valid safetensors file: {reason}.")
