"""safetensors files, written tensor by tensor (format: huggingface/safetensors, README), and folders of several with an index
as Hugging Face has them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import FormatError
from engine.formats.quantformats import FORMATS

_DTYPES = {form.name for form in FORMATS.values() if form.block == 1}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is to be written; ``dtype``: the name that the format gives it (F32, BF16, U8, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * FORMATS[self.dtype].block_bytes


def header(tensors: Sequence[StoredTensor]) -> bytes:
    """What precedes the bytes of the tensors, which follow in this order without gaps."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise FormatError(f"The tensor {tensor.name} is {tensor.dtype}, which safetensors files cannot hold.")
        span = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shards(groups: Sequence[Sequence[StoredTensor]], limit: int) -> Mapping[str, Sequence[Sequence[StoredTensor]]]:
    """The groups of tensors by file name, in order: one file, or several of at most ``limit`` bytes, but for a group that is
    larger alone."""
    files: list[list[Sequence[StoredTensor]]] = [[]]
    filled = 0
    for group in groups:
        size = sum(tensor.nbytes for tensor in group)
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(group)
        filled += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{n:05}-of-{len(files):05}.safetensors": file for n, file in enumerate(files, 1)}


def index(files: Mapping[str, Sequence[Sequence[StoredTensor]]]) -> bytes:
    """The text of model.safetensors.index.json."""
    places = {tensor.name: name for name, groups in files.items() for group in groups for tensor in group}
    size = sum(tensor.nbytes for groups in files.values() for group in groups for tensor in group)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2).encode()
