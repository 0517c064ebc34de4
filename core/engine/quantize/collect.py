"""``engine imatrix``: what the columns of each matrix's input are like over a text.

The program tells: the inputs of its linears are values with names, which a session returns when it is asked to keep them. The
program is not fused, so that each linear has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend.v1 import Array, Call, WeightRef
from engine.errors import ConfigError, ModelError
from engine.evaluate.forward import Forward
from engine.evaluate.windows import read_tokens
from engine.formats import open_checkpoint
from engine.models import Model, load_model
from engine.ops.dtypes import to_f32
from engine.program.build import Program
from engine.quantize.export_delta import in_file_order, output_columns
from engine.quantize.imatrix import Entry, Importance
from engine.runtime.config import EngineConfig
from engine.runtime.load import Loaded, load

Progress = Callable[[str, int, int], None]
_KEPT_BYTES = 64 << 20
"""Memory for the kept values of a chunk."""


@dataclass(frozen=True)
class _Observed:
    """A matrix [experts, N, K] (dense: one expert): the names of its input and, with experts, of the choice of them; ``order``,
    that of its columns in a GGUF, where it is another."""

    x: str
    ids: str | None
    experts: int
    cols: int
    per_choice: bool = False
    order: Array | None = None


@dataclass
class _Sums:
    sums: Array  # f64 [experts, cols]
    counts: Array  # f64 [experts]


def collect(
    model: Path, text: str, dataset: str, context: int, out: Path, progress: Progress | None = None, **settings: Any
) -> Importance:
    """Runs the text in windows of ``context`` tokens, each with the tokenizer's beginning of sequence before it, if it has one.
    ``settings`` are keywords of ``EngineConfig``. Entries have the tensors' names in GGUF files, whatever ``model`` is."""
    loaded, observed = _load(model, context, progress, settings)
    ids = read_tokens(loaded, text)
    tokenizer = loaded.checkpoint.tokenizer()
    lead = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = ids[len(lead) :]
    sums = {name: _Sums(np.zeros((seen.experts, seen.cols)), np.zeros(seen.experts)) for name, seen in observed.items()}
    dtypes = {value.name: value.dtype for placed in loaded.placement.calls for value in placed.call.outputs}
    step, width, none = loaded.plan.limits.dims.T, context - len(lead), np.zeros(0, np.int32)
    with Forward(loaded) as forward:
        for begin in range(0, len(ids), width):
            window = lead + ids[begin : begin + width]
            for start in range(0, len(window), step):
                found = forward.run(window[start : start + step], start, none)
                for name, seen in observed.items():
                    _add(sums[name], seen, found, dtypes)
            if progress is not None:
                progress("Observing", min(begin + width, len(ids)), len(ids))
    entries = {
        name: Entry(total.sums.astype(np.float32)[:, _order(observed[name])], total.counts.astype(np.float32))
        for name, total in sums.items()
    }
    return Importance(out, entries, (dataset,), -(-len(ids) // width), context)


def _load(
    model: Path, context: int, progress: Progress | None, settings: Mapping[str, Any]
) -> tuple[Loaded, dict[str, _Observed]]:
    """The model with the inputs of its linears kept; chunks are short enough for these to fit in memory."""
    checked = EngineConfig(model=model, **settings)
    if checked.tensor_parallel_size > 1:
        raise ConfigError(
            "An importance matrix needs whole inputs, which one rank alone has; leave tensor_parallel_size out."
        )
    opened = load_model(open_checkpoint(model), context)
    program = opened.program(checked.block_size, "f16")
    observed = _observed(program, opened)
    names = {seen.x for seen in observed.values()} | {seen.ids for seen in observed.values() if seen.ids is not None}
    sizes = {value.name: value.shape for call in program.body for value in call.outputs}
    a_token = sum(4 * int(sizes[name][-1]) * int(str(sizes[name][0]).partition("*")[2] or 1) for name in names)
    tokens = max(1, min(checked.max_num_batched_tokens or 512, context, _KEPT_BYTES // a_token))
    own = {"max_model_len": context, "kv_cache_tokens": context, "max_num_seqs": 1, "max_num_batched_tokens": tokens}
    config = EngineConfig(model=model, keep=tuple(sorted(names)), fused=False, **(dict(settings) | own))
    return load(config, progress), observed


def _observed(program: Program, model: Model) -> dict[str, _Observed]:
    """The matrices of the body by their names in GGUF files. ModelError if two values that are wanted share a name."""
    found: dict[str, _Observed] = {}
    values: dict[str, int] = {}
    delta = in_file_order(model) if model.checkpoint.kind == "hf" else None
    apart = () if model.checkpoint.kind == "gguf" else ("gate_up",) if delta is None else ("gate_up", ".ssm_in.")
    for call in program.body:
        if call.op not in ("linear", "moe_linear"):
            continue
        for value in call.inputs.values():
            if values.setdefault(value.name, value.id) != value.id:
                raise ModelError(f"The program has two values named {value.name}, which cannot be told apart.")
        name = _name(call.weights["weight"], apart)
        found[name] = _observation(call)
        if delta is not None and name.endswith(".ssm_out.weight"):
            found[name] = replace(found[name], order=output_columns(delta))
    return found


def _order(seen: _Observed) -> Array | slice:
    return slice(None) if seen.order is None else seen.order


def _name(weight: WeightRef, apart: tuple[str, ...]) -> str:
    """Of the tensor that a part of a fused projection was taken from, but where Hugging Face's files alone have that one, whose
    name has one of ``apart``."""
    stored = _stored(weight).name
    return weight.name if any(part in stored for part in apart) else stored


def _observation(call: Call) -> _Observed:
    weight = call.weights["weight"]
    if call.op == "linear":
        return _Observed(call.inputs["x"].name, None, 1, weight.shape[-1])
    ids = call.inputs["ids"].name
    return _Observed(call.inputs["x"].name, ids, weight.shape[0], weight.shape[-1], bool(call.attr("per_choice")))


def _stored(weight: WeightRef) -> WeightRef:
    while (source := getattr(weight, "source", None)) is not None:
        weight = source
    return weight


def _add(total: _Sums, seen: _Observed, found: Mapping[str, Array], dtypes: Mapping[str, str]) -> None:
    x = to_f32(found[seen.x], dtypes[seen.x])
    if seen.ids is None:
        total.sums[0] += np.square(x).sum(axis=0, dtype=np.float64)
        total.counts[0] += len(x)
        return
    ids = found[seen.ids]
    rows = np.arange(ids.size) if seen.per_choice else np.arange(ids.size) // ids.shape[1]
    for expert in np.unique(ids):
        chosen = x[rows[ids.reshape(-1) == expert]]
        total.sums[expert] += np.square(chosen).sum(axis=0, dtype=np.float64)
        total.counts[expert] += len(chosen)
