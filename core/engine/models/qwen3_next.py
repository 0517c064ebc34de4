"""Qwen3-Next: three layers of linear attention to one of gated attention, and experts beside a shared one in each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.weights import select
from . import gated_delta
from .decoder import DecoderConfig
from .fields import flag
from .gated_delta import DeltaConfig, Projections, configured, layers, unused
from .weights import Weights

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure", "unused"]

HF_DEFAULTS = {**gated_delta.DEFAULTS, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True}
HF_NAMES = {
    **gated_delta.HF_NAMES,
    "blk.{i}.ssm_in.weight": "model.layers.{i}.linear_attn.in_proj_qkvz.weight",
    "blk.{i}.ssm_ba.weight": "model.layers.{i}.linear_attn.in_proj_ba.weight",
}


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DeltaConfig:
    data = checkpoint.metadata
    return configured(replace(c, renormalize=flag(data, "norm_topk_prob", True)), data)


def build(b: Builder, c: DeltaConfig, w: Weights) -> Program:
    return layers(b, c, w, _projections)


def _projections(c: DeltaConfig, w: Weights, i: int) -> Projections:
    """In one matrix each key head has its query, its key, and the values and gates of its value heads; in another beta and
    decay of these."""
    mixed, gates = w(f"blk.{i}.ssm_in.weight"), w(f"blk.{i}.ssm_ba.weight")
    sizes = [c.key_dim, c.key_dim, c.share * c.value_dim, c.share * c.value_dim]
    rows = np.arange(c.key_heads * sum(sizes)).reshape(c.key_heads, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1))
    beta, decay = np.arange(2 * c.value_heads).reshape(c.key_heads, 2, -1).swapaxes(0, 1)
    for weight, needed in ((mixed, rows.size), (gates, 2 * c.value_heads)):
        if weight.shape[0] != needed:
            raise ModelError(
                f"{weight.name} has the shape {list(weight.shape)}, but this model needs {needed} rows; the checkpoint is"
                " inconsistent."
            )
    name = f"blk.{i}.ssm_"
    return Projections(
        select(name + "qkv.weight", mixed, np.concatenate((q, k, v))),
        select(name + "z.weight", mixed, z),
        select(name + "decay.weight", gates, decay.reshape(-1)),
        select(name + "beta.weight", gates, beta.reshape(-1)),
    )
