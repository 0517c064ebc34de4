"""Weights by canonical name (the GGUF names), whatever format the checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..backend.v1 import WeightRef
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.weights import MappedWeight, TransposedWeight, single, stack, transposed
from .ranking import ranks

FileWeight = MappedWeight | TransposedWeight
Names = Mapping[str, str | tuple[str, ...]]

LAYER = "{i}"
EXPERT = "{e}"
# Rotary frequencies, positions and causal masks that files carry; they are worked out, or read by the configuration.
_NEEDLESS = (
    "inv_freq",
    "cos_cached",
    "sin_cached",
    "position_ids",
    ".attn_rot_embd.weight",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)


@dataclass(frozen=True)
class Weights:
    """``names`` maps canonical names to Hugging Face names, or to several of which files have one; ``blk.{i}.`` and
    ``experts.{e}.`` are filled in. A GGUF checkpoint is looked up by canonical name. Some files leave ``prefix`` out of
    all names. ``transposed`` are the ends of canonical names whose matrices lie transposed in Hugging Face files;
    ``unused`` and ``needless`` the beginnings of the names of tensors that are not run, of a part of the model and of none."""

    checkpoint: Checkpoint
    names: Names
    experts: int = 0
    prefix: str = ""
    transposed: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    needless: tuple[str, ...] = ()
    _found: dict[str, MappedWeight] = field(default_factory=dict)

    def __call__(self, name: str) -> FileWeight:
        """The weight, or a ModelError that names what the checkpoint lacks."""
        found = self.maybe(name)
        if found is None:
            lacking = (self._source(name) or name).replace(EXPERT, "0")
            raise ModelError(f"The checkpoint {self.checkpoint.path} lacks the tensor {lacking}.")
        return found

    def maybe(self, name: str) -> FileWeight | None:
        if name not in self._found:
            weight = self._load(name)
            if weight is None:
                return None
            self._found[name] = _numeric(weight)
        weight = self._found[name]
        return transposed(weight) if self.checkpoint.kind == "hf" and name.endswith(self.transposed) else weight

    def first(self, *names: str) -> FileWeight:
        """The first of ``names`` that the checkpoint has, as for tied heads."""
        return next((w for w in map(self.maybe, names) if w is not None), None) or self(names[-1])

    @property
    def without_head(self) -> bool:
        """Whether a Hugging Face file is of the model below the head, which has no such matrix: ``prefix`` is left out, or there
        is a layer of scores."""
        names = self._candidates("token_embd.weight")
        headless = self.checkpoint.kind == "hf" and self._source("output.weight") not in self.checkpoint.tensors
        below = names[0].removeprefix(self.prefix) in self.checkpoint.tensors and names[0] != names[-1]
        return headless and (below or ranks(self.checkpoint))

    @property
    def not_run(self) -> tuple[str, ...]:
        """Names of the checkpoint's tensors that are ``unused``."""
        return tuple(name for name in self.checkpoint.tensors if name.startswith(self.unused))

    def check_all_used(self) -> None:
        """After building: ModelError when a tensor was not asked for, since the model would be another without it."""
        used = {tensor.name for weight in self._found.values() for tensor in weight.tensors}
        rest = [name for name in self.checkpoint.tensors if name not in used and not name.endswith(_NEEDLESS)]
        extra = [name for name in rest if not name.startswith(self.unused + self.needless)]
        if extra:
            raise ModelError(
                f"The checkpoint {self.checkpoint.path} holds {extra[0]}, which its architecture as known here does not use;"
                " it is of a variant that is not supported."
            )

    def _source(self, name: str) -> str | None:
        """The name in this file, or the usual one if it has none of those that it may be."""
        names = self._candidates(name)
        there = (n for n in names if n.replace(EXPERT, "0") in self.checkpoint.tensors)
        return next(there, names[0] if names else None)

    def _candidates(self, name: str) -> tuple[str, ...]:
        if self.checkpoint.kind == "gguf":
            # the first files of Mixtral have a tensor an expert
            return (name, name.replace("_exps.", f".{EXPERT}.")) if "_exps." in name else (name,)
        parts = name.split(".")
        layered = parts[0] == "blk"
        found = self.names.get(".".join(["blk", LAYER, *parts[2:]]) if layered else name, ())
        patterns = (found,) if isinstance(found, str) else found
        patterns += tuple(_stacked(pattern) for pattern in patterns if EXPERT in pattern)
        names = tuple(pattern.replace(LAYER, parts[1]) if layered else pattern for pattern in patterns)
        return names + tuple(n.removeprefix(self.prefix) for n in names)

    def _load(self, name: str) -> MappedWeight | None:
        source, tensors = self._source(name), self.checkpoint.tensors
        if source is None:
            return None
        if EXPERT in source:
            members = [source.replace(EXPERT, str(e)) for e in range(self.experts)]
            if not members or members[0] not in tensors:
                return None
            missing = [m for m in members if m not in tensors]
            if missing:
                raise ModelError(f"The checkpoint {self.checkpoint.path} lacks the expert tensor {missing[0]}.")
            return stack(name, tuple(tensors[m] for m in members))
        return single(name, tensors[source]) if source in tensors else None


def _stacked(pattern: str) -> str:
    """What mlx-lm calls the experts of a layer together."""
    own = pattern.replace(f".experts.{EXPERT}.", ".switch_mlp.")
    for name, usual in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        own = own.replace(f".{name}.", f".{usual}.")
    return own


def needs_rows(weight: WeightRef, needed: int) -> None:
    """ModelError where there are not so many."""
    if weight.shape[0] != needed:
        raise ModelError(
            f"{weight.name} has the shape {list(weight.shape)}, but this model needs {needed} rows; the checkpoint is"
            " inconsistent."
        )


def _numeric(weight: MappedWeight) -> MappedWeight:
    """ModelError for a weight stored as plain integers or truth values, which no model multiplies with."""
    if weight.format in ("I8", "I16", "I32", "I64", "U8", "U32", "BOOL", "F8_E8M0"):
        raise ModelError(
            f"{weight.name} is stored as {weight.format}; a weight must be of a floating or quantized format."
        )
    return weight
