"""Layers of Mamba-2 (Dao and Gu, arXiv 2405.21060) among layers of attention: their sizes, names, and what they compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.v1 import Value, WeightRef
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder
from ..program.weights import select
from .fields import integer
from .weights import Weights, needs_rows

HF_DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_expand": 2,
}
"""Of Granite 4 and Falcon-H1, whose keys ``of_hf`` reads where it is told no others."""


@dataclass(frozen=True)
class Mamba2:
    """Sizes of a layer. B and C of a group are shared by ``heads // groups`` heads, whose memories are [state_dim, head_dim].
    ``norm_first``: the norm, if there is one, is of the scan alone, and the gate comes after it."""

    heads: int
    groups: int
    state_dim: int
    head_dim: int
    norm_first: bool = False

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.heads * self.head_dim

    @property
    def filtered(self) -> int:
        """Columns of the convolution: x, B and C beside each other."""
        return self.inner + 2 * self.groups * self.state_dim


def names(prefix: str) -> dict[str, str]:
    """Canonical name -> Hugging Face's, which begins with ``prefix``: a part of HF_NAMES."""
    own = {
        "in.weight": "in_proj.weight",
        "in.bias": "in_proj.bias",
        "conv1d.weight": "conv1d.weight",
        "conv1d.bias": "conv1d.bias",
        "a": "A_log",
        "d": "D",
        "dt.bias": "dt_bias",
        "norm.weight": "norm.weight",
        "out.weight": "out_proj.weight",
        "out.bias": "out_proj.bias",
    }
    return {f"blk.{{i}}.ssm_{name}": prefix + theirs for name, theirs in own.items()}


def of_gguf(checkpoint: Checkpoint) -> Mamba2:
    data, prefix = checkpoint.metadata, f"{checkpoint.architecture}.ssm."
    heads, groups, state = (integer(data, prefix + key) for key in ("time_step_rank", "group_count", "state_size"))
    return _checked(heads, groups, state, integer(data, prefix + "inner_size"))


def of_hf(
    data: Mapping[str, Any],
    heads: str = "mamba_n_heads",
    groups: str = "mamba_n_groups",
    state_dim: str = "mamba_d_state",
    head_dim: str = "mamba_d_head",
    inner: int = 0,
) -> Mamba2:
    """By the keys of config.json. Where the width of a head is "auto", it is an even part of ``inner``."""
    count = integer(data, heads)
    columns = inner if data.get(head_dim) == "auto" else count * integer(data, head_dim)
    _check_steps(data)
    return _checked(count, integer(data, groups), integer(data, state_dim), columns)


def _checked(heads: int, groups: int, state_dim: int, inner: int) -> Mamba2:
    if heads % groups or inner % heads:
        raise ModelError(
            f"{heads} heads of a state-space layer cannot share {groups} groups and {inner} columns evenly; the checkpoint is"
            " inconsistent."
        )
    return Mamba2(heads, groups, state_dim, inner // heads)


def _check_steps(data: Mapping[str, Any]) -> None:
    """ModelError where the steps between tokens are held within limits."""
    given = data.get("time_step_limit")
    # the last is what transformers writes, as JSON has no such number
    if given not in (None, [0, math.inf], [0, {"__float__": "Infinity"}]):
        raise ModelError(
            f"The configuration's time_step_limit is {given!r}; only 0 to Infinity, no limit, is supported."
        )


def mamba_block(
    b: Builder, m: Mamba2, w: Weights, i: int, h: Value, eps: float, factors: Sequence[float] = (1.0,) * 5
) -> Value:
    """The scan over what a short convolution has mixed, times silu of a gate; then, where there is one, an RMS norm of each
    group's columns. The rows of one projection are those of the gate, of x, B and C, and of the steps. ``factors``: what these
    five are multiplied by."""
    p = f"blk.{i}.ssm_"
    weight, bias = w(p + "in.weight"), w.maybe(p + "in.bias")
    ends = np.cumsum([0, m.inner, m.filtered, m.heads]).tolist()
    needs_rows(weight, ends[-1])
    parts = []
    for name, low, high in zip(("in_z", "in_xbc", "in_dt"), ends, ends[1:], strict=False):
        rows = slice(low, high)
        own = None if bias is None else select(f"{p}{name}.bias", bias, rows)
        parts.append(b.linear(h, select(f"{p}{name}.weight", weight, rows), own, axes=(None, "embed")))
    z, xbc, dt = parts
    vectors = _vectors(b, m, w, i, factors[1:4])
    y = b.ssm_scan(i, xbc, b.scaled(dt, factors[4]), vectors, m.heads, m.groups, m.state_dim, m.head_dim)
    z = b.scaled(z, factors[0])
    y = _normed(b, m, w, i, y, eps) if m.norm_first else b.gated_act(z, y, "silu")
    y = b.gated_act(z, y, "silu") if m.norm_first else _normed(b, m, w, i, y, eps)
    return b.linear(y, w(p + "out.weight"), w.maybe(p + "out.bias"), axes=("embed", None))


def _normed(b: Builder, m: Mamba2, w: Weights, i: int, y: Value, eps: float) -> Value:
    norm = w.maybe(f"blk.{i}.ssm_norm.weight")
    if norm is None:
        return y
    flat = b.constant(norm.name, norm.dense().reshape(-1))
    several = m.groups > 1
    return b.rms_norm(y, flat, eps, m.inner // m.groups if several else 0, wide_weight=several)


def _vectors(b: Builder, m: Mamba2, w: Weights, i: int, factors: Sequence[float]) -> dict[str, WeightRef]:
    """Hugging Face's files have the logarithm of the rate. The filters take the ``factors`` of x, B and C."""
    p = f"blk.{i}.ssm_"
    rate, skip, bias = (w(p + name).dense().reshape(-1) for name in ("a", "d", "dt.bias"))
    conv, conv_bias = w(p + "conv1d.weight").dense(), w.maybe(p + "conv1d.bias")
    if len(conv) != m.filtered:
        raise ModelError(
            f"{p}conv1d.weight has filters of {len(conv)} columns, but this model needs {m.filtered}; the checkpoint is"
            " inconsistent."
        )
    of_columns = np.repeat(np.array(factors, np.float32), [m.inner, *[m.groups * m.state_dim] * 2])
    found: dict[str, WeightRef] = {
        "conv": b.constant(p + "conv1d.weight", conv.reshape(len(conv), -1) * of_columns[:, None]),
        "rate": b.constant(p + "rate", rate if w.checkpoint.kind == "gguf" else -np.exp(rate)),
        "skip": b.constant(p + "skip", skip),
        "bias": b.constant(p + "dt.bias", bias),
    }
    return found if conv_bias is None else found | {"conv_bias": conv_bias}
