"""Qwen3-Next: three layers of linear attention to one of gated attention, and experts beside a shared one in each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..backend.v1 import WeightRef
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.weights import select
from . import gated_delta
from .decoder import DecoderConfig
from .fields import flag
from .gated_delta import DeltaConfig, Projections, configured, decay_and_beta, layers, separate, unused
from .weights import Weights, needs_rows

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure", "unused"]

HF_DEFAULTS = {**gated_delta.DEFAULTS, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True}
HF_NAMES = {
    **gated_delta.HF_NAMES,
    "blk.{i}.ssm_in.weight": "model.layers.{i}.linear_attn.in_proj_qkvz.weight",
    "blk.{i}.ssm_ba.weight": "model.layers.{i}.linear_attn.in_proj_ba.weight",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DeltaConfig:
    renormalize = checkpoint.kind == "gguf" or flag(checkpoint.metadata, "norm_topk_prob", True)
    return configured(replace(c, renormalize=renormalize), checkpoint)


def build(b: Builder, c: DeltaConfig, w: Weights) -> Program:
    return layers(b, c, w, _projections)


def _projections(c: DeltaConfig, w: Weights, i: int) -> Projections:
    """Later GGUF files have apart what is in one matrix elsewhere."""
    mixed = w.maybe(f"blk.{i}.ssm_in.weight")
    if mixed is None:
        return separate(c, w, i)
    return Projections(*parts_in_one(c, mixed), *decay_and_beta(c, w, i))


def parts_in_one(c: DeltaConfig, mixed: WeightRef) -> tuple[WeightRef, WeightRef]:
    """qkv and z, by their names in later GGUF files, of the one matrix blk.N.ssm_in.weight, where each key head has its query,
    its key, and the values and gates of its value heads."""
    sizes = [c.key_dim, c.key_dim, c.share * c.value_dim, c.share * c.value_dim]
    rows = np.arange(c.key_heads * sum(sizes)).reshape(c.key_heads, -1)
    needs_rows(mixed, rows.size)
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1))
    name = mixed.name.replace("ssm_in", "attn_{}").format
    return select(name("qkv"), mixed, np.concatenate((q, k, v))), select(name("gate"), mixed, z)
