"""``engine quantize`` to a GGUF file: tensors pass through in pieces of some rows, so that no model is too large."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from engine.backend.v1 import Array, WeightRef
from engine.errors import FormatError
from engine.formats import FORMATS, Checkpoint
from engine.formats.gguf import Metadata
from engine.formats.gguf_writer import ALIGNMENT, Header, TensorInfo, encode_value
from engine.formats.quantformats import Floats
from engine.program.weights import stored_bytes
from engine.quantize.encode import encode_rows
from engine.quantize.export import Contents, contents
from engine.quantize.imatrix import Importance
from engine.quantize.mix import VALUES, Model, QuantType, choose, fitting, layers_with, quantizable
from engine.quantize.output import check_target, replacing

Progress = Callable[[str, int, int], None]
_PIECE = 1 << 22
"""Weights that are decoded at a time."""


@dataclass(frozen=True)
class Result:
    """Sizes in bytes of the weights before and after, and sentences on what was done otherwise than the type says."""

    before: int
    after: int
    notices: tuple[str, ...]


def quantize_to_gguf(
    checkpoint: Checkpoint,
    out: Path,
    kind: QuantType,
    importance: Importance | None = None,
    threads: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Writes ``out`` whole or not at all. Raises UsageError if it may not be written, ModelError or TokenizerError if the
    checkpoint has no form as a GGUF, FormatError for weights that are not finite."""
    source = contents(checkpoint)
    infos, notices = _choose(source, kind, importance)
    header = Header(_metadata(source, kind, importance), infos, _alignment(checkpoint))
    encoded = header.encode()
    check_target(out, checkpoint.path, len(encoded) + header.data_bytes(), force)
    total, done = sum(map(stored_bytes, source.tensors)), 0
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool, replacing(out) as file:
        file.write(encoded)
        for ref, info in zip(source.tensors, infos, strict=True):
            importances = None if importance is None else importance.of(ref.name, ref.shape)
            with closing(_encoded(ref, info.format, importances, pool)) as pieces:
                for read, piece in pieces:
                    file.write(piece)
                    ref.release()
                    done += read
                    if progress is not None:
                        progress("Quantizing", done, total)
            file.write(bytes(header.padded(info.nbytes) - info.nbytes))
    return Result(total, sum(info.nbytes for info in infos), notices)


def _alignment(checkpoint: Checkpoint) -> int:
    """What the source asks for, since its keys are kept."""
    data = checkpoint.metadata
    return data.integer("general.alignment", ALIGNMENT) if isinstance(data, Metadata) else ALIGNMENT


def _metadata(source: Contents, kind: QuantType, importance: Importance | None) -> Mapping[str, bytes]:
    keys = dict(source.metadata)
    keys |= {"general.file_type": encode_value(kind.file_type), "general.quantization_version": encode_value(2)}
    if importance is not None:
        keys |= {
            "quantize.imatrix.file": encode_value(importance.path.name),
            "quantize.imatrix.dataset": encode_value(", ".join(importance.datasets)),
            "quantize.imatrix.entries_count": encode_value(len(importance.entries)),
            "quantize.imatrix.chunks_count": encode_value(importance.chunks),
        }
    return keys


def _choose(
    source: Contents, kind: QuantType, importance: Importance | None
) -> tuple[tuple[TensorInfo, ...], tuple[str, ...]]:
    """The format of every tensor, and what there is to say about the choice."""
    names = {ref.name for ref in source.tensors}
    model = Model(
        source.architecture,
        source.layers,
        source.shared,
        source.experts,
        "output.weight" not in names,
        importance is not None,
        layers_with(names, VALUES),
        layers_with(names, ".ffn_down.weight"),
    )
    infos: list[TensorInfo] = []
    fallbacks: dict[tuple[str, str, int], int] = {}
    again = 0
    for ref in source.tensors:
        if not quantizable(ref.name, ref.shape):
            infos.append(TensorInfo(ref.name, ref.shape, _kept(ref)))
            continue
        wanted = choose(kind, ref.name, ref.shape, model)
        form = fitting(wanted, ref.shape[-1])
        if form != wanted:
            key = wanted, form, ref.shape[-1]
            fallbacks[key] = fallbacks.get(key, 0) + 1
        again += FORMATS[ref.format].block > 1 and ref.format != form
        infos.append(TensorInfo(ref.name, ref.shape, form))
    notices = [
        f"{_tensors(count)} with rows of {cols}, no whole number of {wanted} blocks, became {form} instead of {wanted}."
        for (wanted, form, cols), count in fallbacks.items()
    ]
    if again:
        notices.append(f"{_tensors(again)} had been quantized before: their first loss adds to the new one.")
    if importance is not None:
        notices += _unseen(infos, importance)
    return tuple(infos), tuple(notices)


def _unseen(infos: list[TensorInfo], importance: Importance) -> Iterator[str]:
    blocks = [i.name for i in infos if FORMATS[i.format].block > 1 and importance.of(i.name, i.shape) is None]
    if blocks:
        yield f"{_tensors(len(blocks))} had no entry in the importance matrix, such as {blocks[0]}."


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _kept(ref: WeightRef) -> str:
    """Tensors that are not quantized are small, and F32: so llama.cpp wants vectors and routers. Blocks that GGUF has stay."""
    return "F32" if ref.format in ("F16", "BF16") or FORMATS[ref.format].ggml_type is None else ref.format


def _encoded(
    ref: WeightRef, form: str, importance: Floats | None, pool: Executor
) -> Generator[tuple[int, memoryview], None, None]:
    """The tensor in its new format, piece by piece: bytes read and bytes to write. ``importance``: f32 [cols], or
    [experts, cols] for each expert's rows."""
    cols, rows = ref.shape[-1], prod(ref.shape[:-1])
    an_expert = rows if importance is None or importance.ndim == 1 else rows // len(importance)
    step = max(_PIECE // cols, 1)
    for first in range(0, rows, an_expert):
        costs = importance if importance is None or importance.ndim == 1 else importance[first // an_expert]
        for start in range(first, first + an_expert, step):
            raw = ref.rows(start, min(start + step, first + an_expert))
            if ref.format == form:
                yield raw.nbytes, np.ascontiguousarray(raw).data
                continue
            values = FORMATS[ref.format].decode(raw).reshape(len(raw), cols)
            _check(ref.name, values, form)
            yield raw.nbytes, encode_rows(form, values, costs, pool).data


def _check(name: str, values: Array, form: str) -> None:
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest):
        raise FormatError(f"The tensor {name} holds a NaN or an infinity, which cannot be quantized.")
    if form == "F16" and largest > 65504:
        raise FormatError(f"The tensor {name} holds {largest:.3g}, which is beyond F16; use BF16.")
