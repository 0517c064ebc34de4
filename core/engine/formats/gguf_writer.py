"""GGUF files, version 3, little endian: the header, so that tensors can follow it piece by piece.

Written from the specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import FormatError
from engine.formats.gguf import MAGIC
from engine.formats.quantformats import FORMATS

VERSION = 3
ALIGNMENT = 32

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10
_ARRAY_TYPES = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that is to be written: its shape, outermost first, and the name of its format."""

    name: str
    shape: tuple[int, ...]
    format: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * FORMATS[self.format].row_bytes(self.shape[-1])


@dataclass(frozen=True)
class Header:
    """All that precedes the tensors' bytes. ``metadata``: key -> a value as the file has it (``encode_value``, or
    ``Metadata.encoded`` of another file). The tensors follow in order, each padded to ``alignment``."""

    metadata: Mapping[str, bytes]
    tensors: Sequence[TensorInfo]
    alignment: int = ALIGNMENT

    def encode(self) -> bytes:
        """The bytes up to the first tensor, padding included. FormatError for a tensor that GGUF cannot hold."""
        parts = [struct.pack("<4sIQQ", MAGIC, VERSION, len(self.tensors), len(self.metadata))]
        parts += [_string(key) + value for key, value in self.metadata.items()]
        offset = 0
        for tensor in self.tensors:
            kind = FORMATS[tensor.format].ggml_type
            if kind is None or not 1 <= len(tensor.shape) <= 4:
                raise FormatError(
                    f"The tensor {tensor.name}, {tensor.format} {list(tensor.shape)}, is of a kind that GGUF files cannot hold."
                )
            sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            parts.append(_string(tensor.name) + sizes + struct.pack("<IQ", kind, offset))
            offset += self.padded(tensor.nbytes)
        header = b"".join(parts)
        return header + bytes(self.padded(len(header)) - len(header))

    def padded(self, size: int) -> int:
        """The next multiple of the alignment."""
        return -(-size // self.alignment) * self.alignment

    def data_bytes(self) -> int:
        """Bytes of all tensors with their padding."""
        return sum(self.padded(tensor.nbytes) for tensor in self.tensors)


def encode_value(value: Any) -> bytes:
    """A string, truth value, number, list of strings or NumPy array of numbers, with its type before it.

    Whole numbers are u32 where they fit, as the keys of the specification want them; other numbers f32.
    """
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return struct.pack("<II", _U32, value)
        return struct.pack("<IQ", _U64, value) if value > 0 else struct.pack("<Ii", _I32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind = _ARRAY_TYPES[value.dtype.name]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + np.ascontiguousarray(value).tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
