"""Weights by canonical name (the GGUF names), whatever format the checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ModelError
from ..formats import Checkpoint
from ..program.weights import MappedWeight, single, stack

LAYER = "{i}"
EXPERT = "{e}"
# Rotary frequencies that old files carry; they are worked out, or read by the configuration.
_NEEDLESS = ("rotary_emb.inv_freq", "rope_freqs.weight")


@dataclass(frozen=True)
class Weights:
    """``names`` maps canonical names to Hugging Face names; ``blk.{i}.`` and ``experts.{e}.`` are filled in. A GGUF
    checkpoint is looked up by canonical name."""

    checkpoint: Checkpoint
    names: Mapping[str, str]
    experts: int = 0
    _found: dict[str, MappedWeight] = field(default_factory=dict)

    def __call__(self, name: str) -> MappedWeight:
        """The weight, or a ModelError that names what the checkpoint lacks."""
        found = self.maybe(name)
        if found is None:
            raise ModelError(f"The checkpoint {self.checkpoint.path} lacks the tensor {self._source(name) or name}.")
        return found

    def maybe(self, name: str) -> MappedWeight | None:
        if name not in self._found:
            weight = self._load(name)
            if weight is None:
                return None
            self._found[name] = weight
        return self._found[name]

    def first(self, *names: str) -> MappedWeight:
        """The first of ``names`` that the checkpoint has, as for tied heads."""
        return next((w for w in map(self.maybe, names) if w is not None), None) or self(names[-1])

    def check_all_used(self) -> None:
        """After building: ModelError when a tensor was not asked for, since the model would be another without it."""
        used = {tensor.name for weight in self._found.values() for tensor in weight.tensors}
        extra = [name for name in self.checkpoint.tensors if name not in used and not name.endswith(_NEEDLESS)]
        if extra:
            raise ModelError(
                f"The checkpoint {self.checkpoint.path} holds {extra[0]}, which its architecture as known here does not use;"
                " it is of a variant that is not supported."
            )

    def _source(self, name: str) -> str | None:
        if self.checkpoint.kind == "gguf":
            return name
        parts = name.split(".")
        if parts[0] != "blk":
            return self.names.get(name)
        pattern = self.names.get(".".join(["blk", LAYER, *parts[2:]]))
        return None if pattern is None else pattern.replace(LAYER, parts[1])

    def _load(self, name: str) -> MappedWeight | None:
        source, tensors = self._source(name), self.checkpoint.tensors
        if source is None:
            return None
        if EXPERT in source:
            members = [source.replace(EXPERT, str(e)) for e in range(self.experts)]
            if members[0] not in tensors:
                return None
            missing = [m for m in members if m not in tensors]
            if missing:
                raise ModelError(f"The checkpoint {self.checkpoint.path} lacks the expert tensor {missing[0]}.")
            return stack(name, tuple(tensors[m] for m in members))
        return single(name, tensors[source]) if source in tensors else None
