"""From a checkpoint to its family: which file builds it, with which names and which configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..errors import ModelError
from ..formats import Checkpoint
from ..kv import CacheGroup
from ..program.build import Builder, Program
from .config import config_from_gguf, config_from_hf
from .decoder import DecoderConfig
from .weights import Weights


@dataclass(frozen=True)
class Family:
    """``gguf`` and ``hf`` are the names that the formats give the architecture; ``interleaved`` tells how GGUF files pair
    rotary dimensions (Hugging Face files pair halves)."""

    name: str
    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    interleaved: bool


FAMILIES: Sequence[Family] = (
    Family("llama", ("llama",), ("llama",), interleaved=True),
    Family("mixtral", (), ("mixtral",), interleaved=True),
    Family("qwen2", ("qwen2",), ("qwen2",), interleaved=False),
    Family("qwen3", ("qwen3",), ("qwen3",), interleaved=False),
)


@dataclass(frozen=True)
class Model:
    """A checkpoint with its family: what the runtime needs to build a program."""

    family: str
    config: DecoderConfig
    checkpoint: Checkpoint
    _weights: Weights
    _build: Callable[[Builder, DecoderConfig, Weights], Program]

    def groups(self, block_size: int) -> tuple[CacheGroup, ...]:
        """The cache groups of this architecture."""
        return (CacheGroup("full", "full", block_size, layers=tuple(range(self.config.layers))),)

    def program(self, block_size: int, kv_dtype: str) -> Program:
        """The op calls of one step."""
        builder = Builder(self.groups(block_size), kv_dtype, self.config.vocab)
        program = self._build(builder, self.config, self._weights)
        self._weights.check_all_used()
        return program


def load_model(checkpoint: Checkpoint) -> Model:
    """The model of a checkpoint; ModelError names the families there are when this one is missing."""
    family = _family(checkpoint)
    module: Any = import_module(f".{family.name}", __package__)
    if checkpoint.kind == "gguf":
        config = config_from_gguf(checkpoint, family.interleaved)
    else:
        config = config_from_hf(checkpoint)
    names: Mapping[str, str] = module.HF_NAMES
    return Model(family.name, config, checkpoint, Weights(checkpoint, names, config.experts), module.build)


def _family(checkpoint: Checkpoint) -> Family:
    name = checkpoint.architecture
    for family in FAMILIES:
        if name in (family.gguf if checkpoint.kind == "gguf" else family.hf):
            # GGUF files of Mixtral call themselves llama and name a number of experts.
            if name == "llama" and checkpoint.kind == "gguf" and checkpoint.metadata.get("llama.expert_count", 0):
                return next(f for f in FAMILIES if f.name == "mixtral")
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ModelError(f"The architecture {name!r} of {checkpoint.path} is not supported; supported are: {known}.")
