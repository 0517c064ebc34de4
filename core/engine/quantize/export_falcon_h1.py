"""Falcon-H1 as GGUF files have it: with the configuration's factors in the weights, since they have no keys for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine.backend.v1 import Array, WeightRef
from engine.formats import FORMATS
from engine.models import Model
from engine.models.falcon_h1 import Factors, FalconH1Config
from engine.program.weights import ConstantWeight, DerivedWeight
from engine.quantize.export_mamba2 import mamba_parts


@dataclass(frozen=True)
class _ScaledRows(DerivedWeight):
    """A matrix whose rows are multiplied by ``factors`` f32 [N], in F32."""

    factors: Array

    @property
    def format(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def rows(self, start: int = 0, stop: int | None = None) -> Array:
        numbers = FORMATS[self.source.format].decode(self.source.rows(start, stop))
        scaled: Array = numbers * self.factors[start:stop, None]
        return scaled.view(np.uint8)

    def dense(self) -> Array:
        scaled: Array = self.source.dense() * self.factors[:, None]
        return scaled


def without_factors(model: Model) -> Model:
    """The model that a GGUF file describes."""
    c = model.config
    if not isinstance(c, FalconH1Config):
        return model
    plain = replace(c, embedding_scale=1.0, logit_scale=1.0, attention_scale=None, factors=Factors())
    return replace(model, config=plain)


def falcon_parts(model: Model, weight: WeightRef) -> Iterator[WeightRef]:
    """What a GGUF has for a weight of a Hugging Face file. llama.cpp has the second norm of a layer without an ending."""
    c = model.config
    assert isinstance(c, FalconH1Config)
    for part in mamba_parts(model, weight):
        if part.name.endswith(".ffn_norm.weight"):
            yield ConstantWeight(part.name.removesuffix(".weight"), part.dense())
        else:
            yield _multiplied(part, part.name, _factors(c, part))
    if weight.name == "token_embd.weight" and model.weight("output.weight") is None:
        yield _multiplied(weight, "output.weight", np.array(c.logit_scale))  # tied, but for the factors


def _multiplied(weight: WeightRef, name: str, factors: Array) -> WeightRef:
    """By a factor, or one a row."""
    if (factors == 1).all() and name == weight.name:
        return weight
    of_rows = np.broadcast_to(factors.astype(np.float32), weight.shape[:1])
    if len(weight.shape) == 1:
        return ConstantWeight(name, weight.dense() * of_rows)
    return _ScaledRows(name, weight, of_rows)


def _factors(c: FalconH1Config, weight: WeightRef) -> Array:
    """A bias is added behind what multiplies a projection's input."""
    f, m, bias = c.factors, c.mamba, weight.name.endswith(".bias")
    before = 1.0 if bias else f.attention_in
    key = 1.0 if c.attention_scale is None else c.attention_scale * math.sqrt(c.head_dim)
    projected = np.repeat(f.projected, [m.inner, m.inner, *[m.groups * m.state_dim] * 2, m.heads])
    found = {
        "token_embd": c.embedding_scale,
        "output": c.logit_scale,
        "attn_q": before,
        "attn_k": before * key,
        "attn_v": before,
        "attn_output": f.attention_out,
        "ssm_in": projected * (1.0 if bias else f.states_in),
        "ssm_out": f.states_out,
        "ffn_gate": f.gate,
        "ffn_down": f.down,
    }
    return np.array(found.get(weight.name.split(".")[-2], 1.0))
