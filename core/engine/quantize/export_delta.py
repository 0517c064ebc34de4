"""Layers of linear attention as GGUF files have them: rates instead of their logarithms, all heads' q, k and v beside each other,
and of Qwen 3.5 the first value heads of all key heads before their second ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.backend.v1 import Array, WeightRef
from engine.errors import ModelError
from engine.formats import FORMATS
from engine.models import Model
from engine.models.gated_delta import DeltaConfig
from engine.models.qwen3_next import parts_in_one
from engine.models.rope import rope_scaling
from engine.program.experts import expert_rows
from engine.program.weights import ConstantWeight, DerivedWeight, select

_SECTIONS = (11, 11, 10)
"""How many pairs of a head turn by time, height and width, where config.json leaves it out."""


@dataclass(frozen=True)
class _Columns(DerivedWeight):
    """A matrix with its columns in another order. Blocks have theirs together, so a quantized one is decoded, to F32."""

    order: Array

    @property
    def format(self) -> str:
        return self.source.format if FORMATS[self.source.format].block == 1 else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        stored = self.source.rows(start, stop)
        if self.format != self.source.format:
            stored = FORMATS[self.source.format].decode(stored).view(np.uint8)
        return stored.reshape(len(stored), self.shape[1], -1)[:, self.order].reshape(len(stored), -1)

    def dense(self) -> Array:
        return np.ascontiguousarray(self.source.dense()[:, self.order])


def delta_keys(model: Model, c: DeltaConfig) -> dict[str, Any]:
    """Beyond the keys of all decoders, without the architecture."""
    keys: dict[str, Any] = {
        "ssm.state_size": c.key_dim,
        "ssm.group_count": c.key_heads,
        "ssm.time_step_rank": c.value_heads,
        "ssm.inner_size": c.value_heads * c.value_dim,
        "attention.recurrent_layers": np.isin(np.arange(c.layers), c.recurrent),
    }
    every = next((i for i in range(c.layers) if i not in c.recurrent), c.layers) + 1
    if c.recurrent == tuple(i for i in range(c.layers) if (i + 1) % every):
        keys["full_attention_interval"] = every
    for i in range(c.layers):
        for name, key in (("ssm_conv1d", "ssm.conv_kernel"), *_WIDTHS):
            if (weight := model.weight(f"blk.{i}.{name}.weight")) is not None:
                keys[key] = weight.shape[-1]
    if model.family == "qwen3_5":
        keys["rope.dimension_sections"] = _sections(model.checkpoint.metadata)
    return keys


_WIDTHS = (
    ("ffn_down_exps", "expert_feed_forward_length"),
    ("ffn_down_shexp", "expert_shared_feed_forward_length"),
)


def _sections(data: Mapping[str, Any]) -> Array:
    found = {**(data.get("rope_parameters") or {}), **rope_scaling(data)}.get("mrope_section", _SECTIONS)
    if not isinstance(found, (list, tuple)) or len(found) > 4 or not all(type(n) is int and n >= 0 for n in found):
        raise ModelError(f"The configuration's mrope_section is {found!r}; it must be up to four whole numbers.")
    return np.array([*found, 0, 0, 0, 0][:4], np.int32)


def in_file_order(model: Model) -> DeltaConfig | None:
    """The configuration that says how GGUF files order the value heads; None for a model without linear attention."""
    c = model.config
    return replace(c, tiled=model.family == "qwen3_5") if isinstance(c, DeltaConfig) else None


def output_columns(c: DeltaConfig) -> Array:
    """The columns of ssm_out, counted in a Hugging Face file, in the order that a GGUF has them in."""
    return np.argsort(c.in_groups(c.value_dim))


def gate_and_up(weight: WeightRef) -> Iterator[WeightRef]:
    """Of all experts, from the one tensor that has the rows of each gate before those of its up."""
    half = weight.shape[1] // 2
    for n, own in enumerate(("gate", "up")):
        yield expert_rows(weight.name.replace("gate_up", own), weight, slice(n * half, (n + 1) * half))


def delta_parts(model: Model, weight: WeightRef) -> Iterator[WeightRef]:
    """What a GGUF has for a weight of a Hugging Face file."""
    c, name, part = in_file_order(model), weight.name, weight.name.split(".")[-2]
    assert c is not None
    heads = np.argsort(c.in_groups(1))
    if part == "ssm_in":
        yield from parts_in_one(c, weight)
    elif part == "ffn_gate_up_exps":
        yield from gate_and_up(weight)
    elif name.endswith(".ssm_a"):
        yield ConstantWeight(name, -np.exp(weight.dense().reshape(-1)[heads]))
    elif part == "ssm_conv1d":
        filters = weight.dense()
        yield ConstantWeight(name, filters.reshape(len(filters), -1)[np.argsort(c.qkv_in_groups())])
    elif not c.tiled:
        yield weight
    elif part in ("ssm_dt", "ssm_alpha", "ssm_beta"):
        yield select(name, weight, heads)
    elif part == "attn_qkv":
        yield select(name, weight, np.argsort(c.qkv_in_groups()))
    elif part == "attn_gate":
        yield select(name, weight, output_columns(c))
    elif part == "ssm_out":
        yield _Columns(name, weight, output_columns(c))
    else:
        yield weight
