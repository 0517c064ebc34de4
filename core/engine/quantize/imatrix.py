"""Importance matrices: for each matrix of a model the mean square of each of its input columns over a text, in the GGUF form
of llama.cpp's llama-imatrix (tools/imatrix/README.md): tensors NAME.in_sum2 [experts, cols] and NAME.counts [experts, 1]."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import FormatError
from engine.formats.gguf import read_parts
from engine.formats.gguf_writer import Header, TensorInfo, encode_value
from engine.formats.quantformats import Floats
from engine.quantize.output import replacing


@dataclass(frozen=True, eq=False)
class Entry:
    """Sums of squares f32 [experts, cols], and of how many rows each is, f32 [experts]. A dense matrix is one expert."""

    sums: Floats
    counts: Floats


@dataclass(frozen=True, eq=False)
class Importance:
    """The entries by tensor name, and what they were taken from: ``chunks`` of ``chunk_size`` tokens of ``datasets``."""

    path: Path
    entries: Mapping[str, Entry]
    datasets: Sequence[str]
    chunks: int
    chunk_size: int

    def of(self, name: str, shape: tuple[int, ...]) -> Floats | None:
        """Mean squares f32 [cols], or [experts, cols] of a tensor [experts, N, K]; None where there is no entry.

        An expert that no token reached has 1 in every column. FormatError if the entry is of another shape.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        experts = shape[0] if len(shape) == 3 else 1
        if entry.sums.shape != (experts, shape[-1]):
            raise FormatError(
                f"{self.path} has {list(entry.sums.shape)} numbers for {name}, where {[experts, shape[-1]]} are needed; it is of"
                " another model."
            )
        counts = entry.counts[:, None]
        means = np.divide(entry.sums, counts, out=np.ones_like(entry.sums), where=counts > 0)
        return means if len(shape) == 3 else means[0]


def read_imatrix(path: Path) -> Importance:
    """An importance matrix in GGUF form; FormatError if it is damaged or something else."""
    metadata, tensors = read_parts(path)
    if metadata.string("general.type") != "imatrix":
        raise FormatError(f"{path} is no importance matrix: its general.type is not imatrix.")
    entries = {}
    for name, tensor in tensors.items():
        if not name.endswith(".in_sum2"):
            continue
        base = name.removesuffix(".in_sum2")
        counted = tensors.get(base + ".counts")
        if counted is None or tensor.format.name != "F32" or counted.format.name != "F32":
            raise FormatError(f"{path} must hold {base}.in_sum2 and {base}.counts, both F32.")
        counts, sums = counted.dense().reshape(-1), tensor.dense().reshape(-1, tensor.shape[-1])
        if len(sums) != len(counts) or not np.isfinite(sums).all() or (sums < 0).any():
            raise FormatError(
                f"{path} must hold a count for each row of {name}, and sums that are finite and not below 0."
            )
        entries[base] = Entry(sums, counts)
    if not entries:
        raise FormatError(f"{path} holds no entries.")
    names = metadata.get("imatrix.datasets", [])
    datasets = [str(name) for name in names] if isinstance(names, list) else []
    chunks, size = (metadata.integer(f"imatrix.{key}", 0) for key in ("chunk_count", "chunk_size"))
    return Importance(path, entries, datasets, chunks, size)


def write_imatrix(importance: Importance) -> None:
    """Writes it to its path, whole or not at all."""
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": list(importance.datasets),
        "imatrix.chunk_count": importance.chunks,
        "imatrix.chunk_size": importance.chunk_size,
    }
    arrays: dict[str, Floats] = {}
    for name in sorted(importance.entries):
        entry = importance.entries[name]
        arrays |= {f"{name}.in_sum2": entry.sums, f"{name}.counts": entry.counts[:, None]}
    infos = tuple(TensorInfo(name, array.shape, "F32") for name, array in arrays.items())
    header = Header({key: encode_value(value) for key, value in keys.items()}, infos)
    with replacing(importance.path) as file:
        file.write(header.encode())
        for info, array in zip(infos, arrays.values(), strict=True):
            assert math.prod(info.shape) == array.size
            file.write(np.ascontiguousarray(array, "<f4").tobytes())
            file.write(bytes(header.padded(info.nbytes) - info.nbytes))
