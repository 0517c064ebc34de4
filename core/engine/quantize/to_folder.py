"""``engine quantize`` to a Hugging Face folder: the model's linear layers in NF4 or INT8, all else as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from engine.errors import FormatError, ModelError, UsageError
from engine.formats import Checkpoint, Tensor
from engine.formats.hfblocks import NF4_TABLE
from engine.formats.quantformats import Floats
from engine.formats.safetensors_writer import StoredTensor, header, index, shards
from engine.models import Model, load_model
from engine.program.weights import MappedWeight, TransposedWeight
from engine.quantize import int8, nf4
from engine.quantize.output import check_target, copy_others, replacing_folder
from engine.quantize.to_gguf import Progress, Result

Kind = Literal["NF4", "INT8"]
_INPUTS = {"NF4": nf4.BLOCK, "INT8": int8.BLOCK}
_PIECE = 1 << 22
"""Weights that are decoded at a time; a multiple of NF4's blocks."""


@dataclass(frozen=True)
class _Group:
    """A tensor of the source, and what it becomes: ``write`` gives the bytes in the order of ``stored``."""

    source: Tensor
    stored: tuple[StoredTensor, ...]
    write: Callable[[], Iterator[tuple[int, bytes | memoryview]]]


def quantize_to_folder(
    checkpoint: Checkpoint,
    out: Path,
    kind: Kind,
    nested: bool = False,
    shard_bytes: int = 5_000_000_000,
    force: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Writes the folder ``out`` whole or not at all. ``nested``: NF4's double quantization. Raises UsageError if it may not be
    written or the checkpoint is no folder of unquantized weights, ModelError for layers that have no such form."""
    if checkpoint.kind != "hf" or checkpoint.metadata.get("quantization_config"):
        raise UsageError(
            f"{kind} is made of a Hugging Face folder with unquantized weights; {checkpoint.path} is none."
        )
    chosen, skipped = _linears(load_model(checkpoint))
    stacked = {name for name in chosen if len(checkpoint.tensors[name].shape) != 2}
    odd = {name for name in chosen - stacked if checkpoint.tensors[name].shape[-1] % _INPUTS[kind]}
    chosen, skipped = chosen - odd - stacked, sorted({*skipped, *(_module(name) for name in odd | stacked)})
    if not chosen:
        raise ModelError(
            f"No layer of {checkpoint.path} is one matrix with a multiple of {_INPUTS[kind]} inputs, which {kind} needs; take a"
            " type of GGUF."
        )
    groups = [
        _group(tensor, kind, nested) if name in chosen else _copied(tensor)
        for name, tensor in checkpoint.tensors.items()
    ]
    before = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
    after = sum(part.nbytes for group in groups for part in group.stored)
    check_target(out, checkpoint.path, after, force, is_folder=True)
    form = _form({checkpoint.tensors[name].format.name for name in chosen})
    config = nf4.config(skipped, form, nested) if kind == "NF4" else int8.config(skipped)
    with replacing_folder(out) as part:
        copy_others(checkpoint.path, part)
        described = dict(checkpoint.metadata) | {"quantization_config": config}
        (part / "config.json").write_text(json.dumps(described, indent=2))
        _write_shards(groups, part, shard_bytes, before, progress)
    why = {
        f"{kind} needs a multiple of {_INPUTS[kind]} inputs, and they have another number": odd,
        f"{kind} has no form for several experts in one tensor; a type of GGUF has": stacked,
    }
    return Result(before, after, tuple(_kept(names, reason) for reason, names in why.items() if names))


def _kept(names: set[str], why: str) -> str:
    first = min(names)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{first}{more} keep their form: {why}."


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _linears(model: Model) -> tuple[set[str], list[str]]:
    """The tensors of the program's linear layers, and the modules that stay as they are: the head and routers."""
    program = model.program(16, "f16")
    routers = {call.inputs["logits"].id for call in program.body if call.op == "moe_route"}
    chosen: set[str] = set()
    skipped: set[str] = set()
    for call in program.calls:
        if call.op not in ("linear", "moe_linear"):
            continue
        weight = call.weights["weight"]
        while not isinstance(weight, MappedWeight):
            if isinstance(weight, TransposedWeight) or not hasattr(weight, "source"):
                raise ModelError(
                    f"The matrices of {model.family} lie transposed, which neither NF4 nor INT8 files allow."
                )
            weight = weight.source
        names = {tensor.name for tensor in weight.tensors}
        kept = call in program.head or call.outputs[0].id in routers
        (skipped if kept else chosen).update(names)
    modules = sorted({_module(name) for name in skipped - chosen} | {"lm_head"})
    return chosen - skipped, modules


def _form(forms: set[str]) -> str:
    """The one format of the layers, which are computed in it."""
    if len(forms) != 1 or not forms <= {"F32", "F16", "BF16"}:
        raise ModelError(f"The linear layers are {', '.join(sorted(forms))}; they must be all F32, F16 or BF16.")
    return forms.pop()


def _copied(tensor: Tensor) -> _Group:
    def write() -> Iterator[tuple[int, bytes | memoryview]]:
        yield tensor.data.nbytes, tensor.data.data

    return _Group(tensor, (StoredTensor(tensor.name, tensor.format.name, tensor.shape),), write)


def _group(tensor: Tensor, kind: Kind, nested: bool) -> _Group:
    if kind == "INT8":
        return _Group(tensor, int8.stored(tensor.name, tensor.shape), lambda: _write_int8(tensor))
    # the offset of nested scales is known once they are; its text is kept at a fixed width so that sizes are known before
    state, _ = nf4.quant_state(tensor.name, tensor.format.name, tensor.shape, _PLACEHOLDER if nested else None)
    return _Group(
        tensor, (*nf4.stored(tensor.name, tensor.shape, nested), state), lambda: _write_nf4(tensor, state, nested)
    )


_PLACEHOLDER = -1.2345678901234567e-100
"""As long as the text of a float can be."""


def _pieces(tensor: Tensor) -> Iterator[tuple[int, Floats]]:
    """Some rows at a time, f32 [rows, K], with the bytes that they were; at least one whole row."""
    rows, step = tensor.rows(), max(_PIECE // tensor.shape[-1], 1)
    step = -(-step // nf4.BLOCK) * nf4.BLOCK  # whole blocks in each piece
    for start in range(0, len(rows), step):
        raw = rows[start : start + step]
        values = tensor.format.decode(raw).reshape(len(raw), -1)
        if not np.isfinite(values).all():
            raise FormatError(f"The tensor {tensor.name} holds a NaN or an infinity, which cannot be quantized.")
        yield raw.nbytes, values


def _write_int8(tensor: Tensor) -> Iterator[tuple[int, bytes | memoryview]]:
    scales = []
    for read, values in _pieces(tensor):
        packed, scale = int8.encode(values)
        scales.append(scale)
        yield read, packed.data
    yield 0, np.concatenate(scales).tobytes()


def _write_nf4(tensor: Tensor, state: StoredTensor, nested: bool) -> Iterator[tuple[int, bytes | memoryview]]:
    scales = []
    for read, values in _pieces(tensor):
        packed, largest = nf4.encode(values.reshape(-1))
        scales.append(largest)
        yield read, packed.data
    largest, offset = np.concatenate(scales), None
    if nested:
        codes, top, offset = nf4.encode_scales(largest)
        yield 0, codes.tobytes() + NF4_TABLE.tobytes() + top.tobytes() + nf4.dynamic_map().tobytes()
    else:
        yield 0, largest.tobytes() + NF4_TABLE.tobytes()
    _, text = nf4.quant_state(tensor.name, tensor.format.name, tensor.shape, offset)
    yield 0, text.ljust(state.nbytes)  # blanks after a JSON text mean nothing


def _write_shards(groups: Sequence[_Group], folder: Path, limit: int, total: int, progress: Progress | None) -> None:
    files = shards([group.stored for group in groups], limit)
    waiting, done = iter(groups), 0
    for name, members in files.items():
        with (folder / name).open("wb") as file:
            file.write(header([tensor for member in members for tensor in member]))
            for _ in members:
                group = next(waiting)
                for read, piece in group.write():
                    file.write(piece)
                    group.source.release()
                    done += read
                    if progress is not None:
                        progress("Quantizing", done, total)
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_bytes(index(files))
