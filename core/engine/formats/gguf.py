"""GGUF files, version 2 and 3, little endian, split ones included.

Written from the specification (ggml-org/ggml, docs/gguf.md).  A file is hostile until checked: every count, length
and offset is compared with the size of the file, in Python integers, before anything is read through it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import Checkpoint, Tensor
from engine.formats.mapping import map_file
from engine.formats.nvfp4 import compose_gguf
from engine.formats.quantformats import FORMATS, Bytes

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_KEY = 65535  # bytes, by the specification
_MAX_NAME = 256  # bytes of a tensor's name; the specification says 64, some writers exceed it
_MAX_DIMS = 4
_MAX_NESTING = 4
_MAX_INNER_ARRAYS = 1 << 16  # of one array; no known key nests at all
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 14  # experts are stacked, so the largest models have some 2,000
_MIN_KEY_VALUE = 8 + 1 + 4 + 1  # length, key, type and value of the shortest key
_MIN_TENSOR_INFO = 8 + 1 + 4 + 8 + 4 + 8  # length, name, dimension count, one dimension, type, offset

_STRING, _ARRAY, _BOOL = 8, 9, 7
_DTYPES = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
_SIZES = {kind: np.dtype(dtype).itemsize for kind, dtype in _DTYPES.items()}
_FORMATS = {form.ggml_type: form for form in FORMATS.values() if form.ggml_type is not None}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_HEADER = struct.Struct("<4sIQQ")
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class _Bytes:
    """Checked reads at a position of the file; each returns the value and the position after it."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path = path
        self.data = data
        self.view = data.data
        self.size = len(data)

    def fail(self, reason: str) -> NoReturn:
        raise FormatError(f"{self.path} is not a valid GGUF file: {reason}.")

    def u32(self, pos: int) -> tuple[int, int]:
        if pos + 4 > self.size:
            self.fail(f"it ends at byte {self.size}, inside its header")
        return _U32.unpack_from(self.view, pos)[0], pos + 4

    def u64(self, pos: int) -> tuple[int, int]:
        if pos + 8 > self.size:
            self.fail(f"it ends at byte {self.size}, inside its header")
        return _U64.unpack_from(self.view, pos)[0], pos + 8

    def string(self, pos: int, what: str, limit: int | None = None) -> tuple[str, int]:
        length, pos = self.u64(pos)
        if length > self.size - pos:
            self.fail(f"{what} at byte {pos} claims {length} bytes, more than the file has left")
        if limit is not None and not 0 < length <= limit:
            self.fail(f"{what} at byte {pos} has {length} bytes, where 1 to {limit} are allowed")
        try:
            return str(self.view[pos : pos + length], "utf-8"), pos + length
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {pos} is not valid UTF-8")

    def array_header(self, pos: int) -> tuple[int, int, int]:
        """Element type, count (which fits in the file) and the position of the first element."""
        kind, pos = self.u32(pos)
        count, pos = self.u64(pos)
        smallest = {_STRING: 8, _ARRAY: 12}.get(kind) or _SIZES.get(kind)
        if smallest is None:
            self.fail(f"the array at byte {pos} has the unknown element type {kind}")
        if count > (self.size - pos) // smallest:
            self.fail(f"the array at byte {pos} claims {count} elements, more than the file has room for")
        return kind, count, pos

    def skip(self, kind: int, pos: int, depth: int = 0) -> int:
        """The position after a value, which has been checked to lie inside the file."""
        if kind == _ARRAY:
            return self._skip_array(pos, depth)
        if kind == _STRING:
            length, pos = self.u64(pos)
            after = pos + length
        elif kind in _SIZES:
            after = pos + _SIZES[kind]
        else:
            self.fail(f"the value at byte {pos} has the unknown type {kind}")
        if after > self.size:
            self.fail(f"the value at byte {pos} reaches past the end of the file")
        return after

    def _skip_array(self, pos: int, depth: int) -> int:
        if depth == _MAX_NESTING:
            self.fail(f"the array at byte {pos} is nested more than {_MAX_NESTING} deep")
        kind, count, pos = self.array_header(pos)
        if kind in _SIZES:
            return pos + count * _SIZES[kind]
        if kind == _ARRAY:
            if count > _MAX_INNER_ARRAYS:
                self.fail(f"the array at byte {pos} holds {count} arrays, where {_MAX_INNER_ARRAYS} are the most")
            for _ in range(count):
                pos = self._skip_array(pos, depth + 1)
            return pos
        view, length_at = self.view, _U64.unpack_from
        try:
            for _ in range(count):
                pos += 8 + length_at(view, pos)[0]
        except (struct.error, OverflowError):
            pos = self.size + 1
        if pos > self.size:
            self.fail("a string of an array reaches past the end of the file")
        return pos

    def value(self, kind: int, pos: int, after: int) -> Any:
        """The value at a position that `skip` has been over, and given the position after it."""
        if kind == _STRING:
            return self.string(pos, "a string")[0]
        if kind == _ARRAY:
            return self._array(pos, after)
        number = np.frombuffer(self.data, _DTYPES[kind], 1, pos).item()
        return bool(number) if kind == _BOOL else number

    def _array(self, pos: int, after: int) -> Any:
        kind, count, pos = self.array_header(pos)
        if kind in _SIZES:
            numbers = np.frombuffer(self.data, _DTYPES[kind], count, pos)
            return numbers != 0 if kind == _BOOL else numbers
        if kind == _ARRAY:
            arrays = []
            for _ in range(count):
                end = self._skip_array(pos, 0)
                arrays.append(self._array(pos, end))
                pos = end
            return arrays
        return self._strings(count, pos, after)

    def _strings(self, count: int, pos: int, after: int) -> list[str]:
        """From a copy of their bytes: slices of bytes are made faster than a memoryview's."""
        data, length_at = self.view[pos:after].tobytes(), _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        end = 0
        try:
            for _ in range(count):
                start = end + 8
                end = start + length_at(data, end)[0]
                append(data[start:end].decode())
        except UnicodeDecodeError:
            self.fail(f"string {len(strings)} of the array is not valid UTF-8")
        return strings


class Metadata(Mapping[str, Any]):
    """The keys of a GGUF; a value is read when it is asked for, and kept, but for arrays, which may be large."""

    def __init__(self, file: _Bytes) -> None:
        self._file = file
        self._places: dict[str, tuple[int, int, int]] = {}  # key -> (type, position, position after it)
        self._values: dict[str, Any] = {}

    def scan(self, count: int, pos: int) -> int:
        """Notes the place of `count` keys from `pos` on; returns the position after them."""
        file = self._file
        for _ in range(count):
            key, pos = file.string(pos, "a key", _MAX_KEY)
            if key in self._places:
                file.fail(f"the key {key!r} is there twice")
            kind, pos = file.u32(pos)
            after = file.skip(kind, pos)
            self._places[key] = kind, pos, after
            pos = after
        return pos

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        place = self._places[key]
        value = self._file.value(*place)
        if place[0] != _ARRAY:
            self._values[key] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def encoded(self, key: str) -> bytes:
        """A value's type and bytes as they stand in the file."""
        kind, pos, after = self._places[key]
        return _U32.pack(kind) + self._file.data[pos:after].tobytes()

    def integer(self, key: str, default: int) -> int:
        """A whole number that is not negative; FormatError if the key holds anything else."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self._file.fail(f"the key {key!r} must hold a whole number that is not negative")
        return value

    def string(self, key: str) -> str | None:
        """A string, or None if the key is absent; FormatError if it holds anything else."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self._file.fail(f"the key {key!r} must hold a string")
        return value


def _read_part(path: Path) -> tuple[Metadata, dict[str, Tensor]]:
    file = _Bytes(path, map_file(path))
    if file.size < _HEADER.size:
        file.fail(f"it has {file.size} bytes, fewer than a header")
    magic, version, tensor_count, key_count = _HEADER.unpack_from(file.view, 0)
    if magic != MAGIC:
        file.fail("it does not start with the bytes GGUF")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            file.fail("it is big-endian, where little-endian is needed")
        file.fail(f"its version is {version}, where 2 or 3 is needed")
    if key_count > file.size // _MIN_KEY_VALUE:
        file.fail(f"it claims {key_count} keys, more than it has room for")
    if tensor_count > file.size // _MIN_TENSOR_INFO:
        file.fail(f"it claims {tensor_count} tensors, more than it has room for")
    if key_count > _MAX_KEYS or tensor_count > _MAX_TENSORS:
        file.fail(
            f"it has {key_count} keys and {tensor_count} tensors, where {_MAX_KEYS} and {_MAX_TENSORS} are the most"
        )
    metadata = Metadata(file)
    pos = metadata.scan(key_count, _HEADER.size)
    return metadata, _read_tensors(file, metadata, tensor_count, pos)


def _read_tensors(file: _Bytes, metadata: Metadata, count: int, pos: int) -> dict[str, Tensor]:
    alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment.bit_count() != 1 or alignment > _MAX_ALIGNMENT:
        file.fail(f"its alignment is {alignment}, not a power of two up to {_MAX_ALIGNMENT}")
    infos = []
    for _ in range(count):
        name, pos = file.string(pos, "a tensor's name", _MAX_NAME)
        dims, pos = file.u32(pos)
        if not 1 <= dims <= _MAX_DIMS:
            file.fail(f"tensor {name!r} has {dims} dimensions, where 1 to {_MAX_DIMS} are allowed")
        sizes = []
        for _ in range(dims):
            size, pos = file.u64(pos)
            sizes.append(size)
        kind, pos = file.u32(pos)
        offset, pos = file.u64(pos)
        infos.append((offset, name, tuple(reversed(sizes)), kind))
    start = -(-pos // alignment) * alignment
    tensors = {}
    for offset, name, shape, kind in infos:
        if name in tensors:
            file.fail(f"the tensor {name!r} is there twice")
        if offset % alignment:
            file.fail(f"tensor {name!r} lies at offset {offset}, not a multiple of the alignment {alignment}")
        tensors[name] = _tensor(file, name, shape, kind, start + offset)
    expected, previous = 0, ""
    for offset, name, _, _ in sorted(infos):
        if offset < expected:
            file.fail(f"tensor {name!r} overlaps {previous!r}")
        if offset > expected:
            file.fail(f"{offset - expected} bytes before tensor {name!r} belong to no tensor")
        expected, previous = -(-(offset + tensors[name].data.size) // alignment) * alignment, name
    return tensors


def _tensor(file: _Bytes, name: str, shape: tuple[int, ...], kind: int, start: int) -> Tensor:
    form = _FORMATS.get(kind)
    if form is None:
        known = ", ".join(known.name for known in _FORMATS.values())
        file.fail(f"tensor {name!r} has the type {kind}, which is none of {known}")
    if 0 in shape:
        file.fail(f"tensor {name!r} has a dimension of 0")
    if shape[-1] % form.block:
        file.fail(f"tensor {name!r} has rows of {shape[-1]}, not a whole number of {form.name} blocks of {form.block}")
    size = math.prod(shape[:-1]) * form.row_bytes(shape[-1])
    if start + size > file.size:
        file.fail(
            f"tensor {name!r} needs bytes {start} to {start + size} of a file of {file.size}, which may be cut short"
        )
    return Tensor(name, shape, form, file.data[start : start + size])


def _parts(path: Path, metadata: Metadata) -> list[Path]:
    """The paths of all parts of a split model, or `path` alone."""
    count = metadata.integer("split.count", 1)
    if count <= 1:
        return [path]
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise FormatError(
            f"{path} is one of {count} parts of a split GGUF, so its name must end like -00001-of-{count:05}.gguf."
        )
    return [path.with_name(f"{name['stem']}-{number:05}-of-{name['count']}.gguf") for number in range(1, count + 1)]


def read_parts(path: Path) -> tuple[Metadata, dict[str, Tensor]]:
    """The metadata of the first part and the tensors of all."""
    opened = _read_part(path)
    paths = _parts(path, opened[0])
    if len(paths) == 1:
        return opened
    for part in paths:
        if not part.is_file():
            raise FormatError(f"{part} is missing: all {len(paths)} parts of a split GGUF must lie in one folder.")
    parts = [opened if part == path else _read_part(part) for part in paths]
    tensors: dict[str, Tensor] = {}
    for number, (part, (metadata, part_tensors)) in enumerate(zip(paths, parts, strict=True)):
        if metadata.integer("split.no", len(paths)) != number or metadata.integer("split.count", 0) != len(paths):
            raise FormatError(f"{part} is not part {number + 1} of {len(paths)} by its split.no and split.count.")
        if twice := next((name for name in part_tensors if name in tensors), None):
            raise FormatError(f"{part} holds the tensor {twice!r} that an earlier part holds too.")
        tensors |= part_tensors
    promised = parts[0][0].integer("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise FormatError(f"{path} and its other parts hold {len(tensors)} tensors where {promised} are promised.")
    return parts[0][0], tensors


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file; of a split one any part opens the whole."""
    from engine.formats import pooling, ranking_files, recommended, tokenizer_gguf

    metadata, tensors = read_parts(path)
    architecture = metadata.string("general.architecture")
    if not architecture:
        raise FormatError(f"{path} does not name its architecture in general.architecture.")
    return Checkpoint(
        path=path,
        kind="gguf",
        architecture=architecture,
        metadata=metadata,
        tensors=compose_gguf(tensors, architecture),
        eos_ids=tokenizer_gguf.eos_ids(metadata),
        sampling=recommended.of_gguf(metadata),
        load_tokenizer=partial(tokenizer_gguf.build_tokenizer, metadata),
        load_chat_template=partial(tokenizer_gguf.chat_template, metadata),
        load_embedding=partial(pooling.of_gguf, architecture, metadata, tensors),
        load_ranking=partial(ranking_files.of_gguf, architecture, metadata),
    )
